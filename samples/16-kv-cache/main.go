// Command 16-kv-cache keeps what a language model has computed for each token of its
// sequences (keys and values) in arrays that grow as tokens come. Sequences that begin
// with the same prompt share its memory: each is a fork of the prompt, and what it
// appends is its own.
//
//	go run ./samples/16-kv-cache [-driver auto|real|sim] [-prompt TOKENS] [-stay TIME]
//
// While it stays, cuvmm map shows the memory that the sequences share.
package main

import (
	"context"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "16-kv-cache",
	Shows: "sequences that share the memory of their prompt, and grow apart",
	Next:  "17-sidecar: a publication that outlives its publisher",
	Run:   run,
}

func main() { app.Main(sample) }

const (
	sequences = 4
	steps     = 50 // tokens that each sequence gets
	mib       = 1 << 20
)

// token is what the cache keeps of a token.
type token struct{ Key, Value [64]float32 }

// tokenOf stands for the model: it returns what is computed for a token.
func tokenOf(sequence, at int) (t token) {
	for i := range t.Key {
		t.Key[i], t.Value[i] = float32(sequence), float32(at+i)
	}
	return t
}

func run(e *app.Env) (err error) {
	length := e.Flags.Int("prompt", 20_000, "the prompt's length in `tokens`")
	stay := e.Flags.Duration("stay", 0, "how much `time` to keep the sequences, in which cuvmm map can show them")
	if err := e.Open(); err != nil {
		return err
	}
	if *stay > 0 {
		if err := e.Offer(); err != nil {
			return err
		}
	}
	if *length < 1 || *length > 1<<20 {
		return app.Usagef("-prompt %d: use 1 to %d", *length, 1<<20)
	}
	stream, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(stream, &err)
	prompt, err := vmm.NewArray[token](e.Device, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib), Name: "tokens"})
	if err != nil {
		return err
	}
	defer app.Close(prompt, &err)
	tokens := make([]token, *length)
	for i := range tokens {
		tokens[i] = tokenOf(0, i)
	}
	if _, err := prompt.Append(stream, tokens); err != nil {
		return err
	}
	e.Line("prompt", "%d tokens in %d MiB", prompt.Len(), prompt.Stats().Committed/mib)

	// A fork shares the prompt's whole chunks and copies the rest, less than one.
	var cache [sequences]*vmm.Array[token]
	for i := range cache {
		if cache[i], err = prompt.Fork(stream, *length, vmm.ForkOptions{}); err != nil {
			return err
		}
		defer app.Close(cache[i], &err)
	}
	for step := range steps {
		for i, sequence := range cache {
			if _, err := sequence.Append(stream, []token{tokenOf(i+1, *length+step)}); err != nil {
				return err
			}
		}
	}
	var apart int
	for _, sequence := range cache {
		apart += sequence.Stats().Committed
	}
	e.Line("sequences", "%d of %d tokens, at addresses of their own", sequences, cache[0].Len())
	e.Line("memory", "%d MiB with the prompt, of which each sequence shares %d MiB; apart they would have %d MiB",
		e.System.Stats().AllocatedBytes/mib, cache[0].Stats().Shared/mib, (apart+prompt.Stats().Committed)/mib)
	for i, sequence := range cache {
		if err := check(stream, sequence, i+1, *length); err != nil {
			return err
		}
	}

	select {
	case <-time.After(*stay):
	case <-e.Context.Done():
	}

	// A sequence that ends gives back what only it has, when its stream has passed.
	before := e.System.Stats().AllocatedBytes
	if err := cache[0].CloseAfter(stream); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, time.Minute)
	defer cancel()
	if err := cache[0].Released().Wait(ctx); err != nil {
		return err
	}
	e.Line("ended", "the first sequence gave back %d MiB", (before-e.System.Stats().AllocatedBytes)/mib)
	if err := check(stream, cache[1], 2, *length); err != nil {
		return err
	}
	e.Line("verified", "every sequence has its prompt and its own tokens")
	return nil
}

// check reads a sequence back.
func check(stream *cuda.Stream, sequence *vmm.Array[token], number, prompt int) error {
	tokens := make([]token, sequence.Len())
	if err := sequence.All().CopyTo(stream, tokens); err != nil {
		return err
	}
	for i, t := range tokens {
		want := tokenOf(number, i)
		if i < prompt {
			want = tokenOf(0, i)
		}
		if t != want {
			return fmt.Errorf("token %d of sequence %d is not what was appended", i, number)
		}
	}
	return nil
}
