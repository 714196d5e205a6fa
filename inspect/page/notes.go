package page

// # How the page is made
//
// Notes for readers of the source; the package document is for users.
//
// The page is one script of five parts: model.js makes regions with mappings and blocks of one
// snapshot or of two, layout.js gives groups and regions their places, draw.js draws the rows
// that the window shows on one canvas, panels.js fills what is beside it, and map.js follows
// the keys, the mouse and, in a live page, the process. Only the last three know of a document.
//
// A group's scale is the number of bytes of a row: the smallest power of two with which its
// regions have room. A region whose memory would get less than a sixteenth of a row at that
// scale gets a larger one, which is written behind it, so that nothing is too small to see
// however different the sizes are. Long holes are shortened, and hatched.
//
// Addresses are BigInts, offsets numbers. What the terminal prints too (sizes, the line of a
// region, uses and changes) is computed in the same way as in Go, and a test of cmd/cuvmm
// compares the two.
//
// The tests run in a headless browser (internal/test/browser). To look at the page,
//
//	CUVMM_PAGES=/tmp/pages go test -run LookAtThePage ./inspect/page
//
// writes pictures of it, light and dark, wide and narrow, and with map.png the picture of the
// README (docs/map.png).
