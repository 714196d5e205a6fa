package tracegen

// kept is what the forward pass of a layer keeps for its backward pass.
type kept struct {
	rstd1, norm1, q, k, v, attention, lse, residual, rstd2, norm2, gate, up, silu, product block

	adapters []block // the low-rank inner values, by matrix
}

// layerForward runs a layer over so many tokens, and returns its output. What
// the backward pass needs is kept or, in a pass without gradients, given back
// as soon as the layer itself is through with it. adapt follows each matrix,
// and may be nil.
func (b *builder) layerForward(m model, tokens uint64, keep bool, adapt func(k *kept, l linear)) (output block, k kept) {
	drop := func(x ...block) {
		if !keep {
			b.free(x...)
		}
	}
	linears := m.linears()
	matrix := func(l linear) block {
		x := b.act(tokens * l.out)
		if adapt != nil {
			adapt(&k, l)
		}
		return x
	}
	k.rstd1 = b.alloc(tagActivations, 4*tokens)
	k.norm1 = b.act(tokens * m.hidden)
	q, key := matrix(linears[0]), matrix(linears[1])
	k.v = matrix(linears[2])
	drop(k.norm1, k.rstd1)
	k.q = b.rotated(tokens*m.width(), q)
	k.k = b.rotated(tokens*m.kvWidth(), key)
	k.attention = b.act(tokens * m.width())
	k.lse = b.alloc(tagActivations, 4*tokens*m.heads)
	drop(k.q, k.k, k.v, k.lse)
	out := matrix(linears[3])
	drop(k.attention)
	k.residual = b.act(tokens * m.hidden)
	b.free(out)
	k.rstd2 = b.alloc(tagActivations, 4*tokens)
	k.norm2 = b.act(tokens * m.hidden)
	k.gate, k.up, k.silu, k.product = matrix(linears[4]), none, none, none
	if m.gated {
		k.up = matrix(linears[5])
	}
	drop(k.norm2, k.rstd2)
	k.silu = b.act(tokens * m.ff)
	drop(k.gate)
	inner := k.silu
	if m.gated {
		k.product = b.act(tokens * m.ff)
		drop(k.silu, k.up)
		inner = k.product
	}
	down := matrix(linears[len(linears)-1])
	drop(inner)
	output = b.act(tokens * m.hidden)
	b.free(down)
	drop(k.residual)
	return output, k
}

// rotated replaces a query or key by its form with positions.
func (b *builder) rotated(elements uint64, x block) block {
	half := b.act(elements)
	result := b.act(elements)
	b.free(half, x)
	return result
}

// layerBackward takes the gradient of a layer's output, gives it and what the
// forward pass kept back, and returns the gradient of the input. parameter is
// called where the gradient of a matrix (by index in linears) is due.
func (b *builder) layerBackward(m model, tokens uint64, k kept, grad block, parameter func(matrix int)) block {
	last := len(m.linears()) - 1
	dinner := b.act(tokens * m.ff)
	parameter(last)
	b.free(k.product)
	var dgate block
	dup := none
	if m.gated {
		dup = b.act(tokens * m.ff)
		dsilu := b.act(tokens * m.ff)
		b.free(dinner, k.up, k.silu)
		dgate = b.act(tokens * m.ff)
		b.free(dsilu)
	} else {
		dgate = b.act(tokens * m.ff)
		b.free(dinner, k.silu)
	}
	b.free(k.gate)
	dnorm := b.act(tokens * m.hidden)
	parameter(4)
	b.free(dgate)
	if m.gated {
		more := b.act(tokens * m.hidden)
		parameter(5)
		b.free(dup, more)
	}
	b.free(k.norm2)
	dresidual := b.act(tokens * m.hidden)
	b.free(dnorm, k.rstd2, k.residual)
	total := b.act(tokens * m.hidden)
	b.free(dresidual, grad)

	dattention := b.act(tokens * m.width())
	parameter(3)
	softmax := b.alloc(tagActivations, 4*tokens*m.heads)
	accumulator := b.alloc(tagWorkspace, 4*tokens*m.width())
	dq, dk, dv := b.act(tokens*m.width()), b.act(tokens*m.kvWidth()), b.act(tokens*m.kvWidth())
	b.free(accumulator, softmax, dattention, k.attention, k.q, k.k, k.v, k.lse)
	dq = b.rotated(tokens*m.width(), dq)
	dk = b.rotated(tokens*m.kvWidth(), dk)
	dnorm = none
	for i, d := range []block{dv, dk, dq} {
		more := b.act(tokens * m.hidden)
		parameter(2 - i)
		b.free(d)
		if dnorm == none {
			dnorm = more
		} else {
			b.free(more)
		}
	}
	b.free(k.norm1)
	dinput := b.act(tokens * m.hidden)
	b.free(dnorm, k.rstd1)
	result := b.act(tokens * m.hidden)
	b.free(dinput, total)
	b.free(k.adapters...)
	return result
}

// crossEntropy takes the last norm's activations, and those of the loss and of the gradient of its logits.
func (b *builder) crossEntropy(m model, tokens uint64) (norm, dlogits, loss block) {
	norm = b.act(tokens * m.hidden)
	logits := b.act(tokens * m.vocab)
	wide := b.alloc(tagActivations, 4*tokens*m.vocab)
	b.free(logits)
	loss = b.alloc(tagActivations, 4)
	dwide := b.alloc(tagActivations, 4*tokens*m.vocab)
	b.free(wide)
	dlogits = b.act(tokens * m.vocab)
	b.free(dwide)
	return norm, dlogits, loss
}
