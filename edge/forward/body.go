// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
)

// ErrAbandoned is what an attempt reads once another attempt has taken over, or
// the request has ended.
var ErrAbandoned = errors.New("forward: the attempt is over")

// Budget bounds what all bodies together may record. Safe for concurrent use.
type Budget struct {
	limit int64
	used  atomic.Int64
}

// NewBudget returns a budget of that many bytes.
func NewBudget(bytes int64) *Budget { return &Budget{limit: bytes} }

// Used returns the bytes that are recorded now.
func (b *Budget) Used() int64 { return b.used.Load() }

func (b *Budget) take(n int64) bool {
	if b.used.Add(n) > b.limit {
		b.used.Add(-n)
		return false
	}
	return true
}

// chunks and largeChunks lend what the source is read into. Each one that is read
// costs two changes of the goroutine, which a large body must not pay for often.
var (
	chunks      = sync.Pool{New: func() any { b := make([]byte, 16<<10); return &b }}
	largeChunks = sync.Pool{New: func() any { b := make([]byte, largeChunk); return &b }}
)

const largeChunk = 64 << 10

// Body is a request's body that can be sent more than once as long as what was
// read of it is recorded: up to limit bytes, and within the budget. Past that it
// goes on, but only once.
//
// The source is read by a goroutine of its own, begun by the first read and never
// ahead of an attempt: closing an attempt ends a read of it that waits for the
// client. The goroutine ends with the source, or after [Body.Close] once the read
// it is in returns.
type Body struct {
	src    io.Reader
	length int64
	limit  int
	budget *Budget
	onEOF  func()

	mu      sync.Mutex // guards what follows
	turn    *sync.Cond // anything below has changed
	buf     []byte     // what was read of src from its start; nil once lost
	pending []byte     // what was read after that, for the present attempt only
	charged int64      // bytes of budget
	read    int64      // bytes read of src
	lost    bool       // no other attempt can have the start
	done    bool       // no other attempt is wanted
	closed  bool       // nothing is wanted any more
	err     error      // how src ended
	pumping bool       // the goroutine runs
	wanted  bool       // an attempt waits for more of src
	cur     *attempt
}

// NewBody wraps a request's body of the given length, -1 when it is not known.
// onEOF, if set, is called once when src has been read to its end, before the
// reader learns of it.
func NewBody(src io.Reader, length int64, limit int, budget *Budget, onEOF func()) *Body {
	b := &Body{src: src, length: length, limit: limit, budget: budget, onEOF: onEOF}
	b.turn = sync.NewCond(&b.mu)
	return b
}

// Attempt ends the attempt before and returns the body from its start. It returns
// nil when the start is lost or the body was committed or closed.
func (b *Body) Attempt() io.ReadCloser {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cur != nil {
		b.cur.closed = true
		b.cur = nil
		b.turn.Broadcast()
	}
	if b.lost || b.done {
		return nil
	}
	b.cur = &attempt{b: b}
	return b.cur
}

// Replayable reports whether another attempt would see the whole body.
func (b *Body) Replayable() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.lost && !b.done
}

// Recorded returns the number of bytes that are kept for another attempt.
func (b *Body) Recorded() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return int64(len(b.buf))
}

// Read returns how many bytes of the source were read so far.
func (b *Body) Read() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.read
}

// Finished reports whether nothing of the source is left to be read.
func (b *Body) Finished() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err != nil || b.length >= 0 && b.read >= b.length
}

// Err returns how the source ended: nil while it has not, io.EOF at its end, else
// the error of reading from the client.
func (b *Body) Err() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// Commit says that the present attempt is the last: what it has read already is
// forgotten. The attempt goes on.
func (b *Body) Commit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done = true
	if b.cur == nil || b.cur.off >= len(b.buf) {
		b.forget()
	}
}

// Close ends the present attempt and forgets everything. busy reports that a read
// of the source is under way: it is not waited for, and no other follows.
func (b *Body) Close() (busy bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done, b.closed = true, true
	if b.cur != nil {
		b.cur.closed = true
		b.cur = nil
	}
	b.forget()
	b.pending = nil
	b.turn.Broadcast()
	return b.pumping && b.wanted && b.err == nil
}

// forget drops the record; mu is held.
func (b *Body) forget() {
	b.buf = nil
	b.lost = b.lost || b.read > 0
	if b.budget != nil {
		b.budget.used.Add(-b.charged)
	}
	b.charged = 0
}

// pump reads the source when an attempt wants more of it.
func (b *Body) pump() {
	pool := &chunks
	if b.length >= largeChunk {
		pool = &largeChunks
	}
	chunk := pool.Get().(*[]byte)
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		for !b.wanted && !b.closed {
			b.turn.Wait()
		}
		if b.closed {
			break
		}
		b.mu.Unlock()
		n, err := b.src.Read(*chunk)
		b.mu.Lock()
		b.record((*chunk)[:n])
		b.err = err
		if err == io.EOF && b.onEOF != nil {
			b.onEOF()
		}
		if n > 0 || err != nil {
			b.wanted = false
			b.turn.Broadcast()
		}
		// The chunk is read out before it is used again.
		for len(b.pending) > 0 && !b.closed {
			b.turn.Wait()
		}
		if err != nil {
			break
		}
	}
	b.pumping = false
	pool.Put(chunk)
}

// record keeps p for another attempt, or gives up on that; mu is held.
func (b *Body) record(p []byte) {
	b.read += int64(len(p))
	if len(p) == 0 || b.closed {
		return
	}
	keep := !b.lost && !b.done && len(b.buf)+len(p) <= b.limit
	if need := int64(len(b.buf)+len(p)) - b.charged; keep && need > 0 {
		// Charged in steps, so that small reads do not contend for the budget.
		need = (need + 4095) &^ 4095
		if keep = b.budget == nil || b.budget.take(need); keep {
			b.charged += need
		}
	}
	if keep {
		if b.buf == nil && b.length > 0 && b.length <= int64(b.limit) {
			b.buf = make([]byte, 0, b.length)
		}
		b.buf = append(b.buf, p...)
		return
	}
	b.lost, b.pending = true, p
	if b.cur == nil || b.cur.off >= len(b.buf) {
		b.forget()
	}
}

// attempt is one reading of a Body. Its fields are guarded by b.mu.
type attempt struct {
	b      *Body
	off    int // in b.buf
	closed bool
}

func (a *attempt) Read(p []byte) (int, error) {
	b := a.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		switch {
		case a.closed:
			return 0, ErrAbandoned
		case a.off < len(b.buf):
			n := copy(p, b.buf[a.off:])
			a.off += n
			if (b.done || b.lost) && a.off >= len(b.buf) {
				b.forget()
			}
			return n, nil
		case len(b.pending) > 0:
			n := copy(p, b.pending)
			if b.pending = b.pending[n:]; len(b.pending) == 0 {
				b.turn.Broadcast()
			}
			return n, nil
		case b.err != nil:
			return 0, b.err
		case len(p) == 0:
			return 0, nil
		}
		if !b.pumping {
			b.pumping = true
			go b.pump()
		}
		if !b.wanted {
			b.wanted = true
			b.turn.Broadcast()
		}
		b.turn.Wait()
	}
}

// Close ends the attempt, and a Read of it that waits. The source stays open.
func (a *attempt) Close() error {
	a.b.mu.Lock()
	defer a.b.mu.Unlock()
	if !a.closed {
		a.closed = true
		if a.b.cur == a {
			a.b.cur = nil
		}
		a.b.turn.Broadcast()
	}
	return nil
}

// empty is the body of a request that has none. It is not http.NoBody: with that,
// net/http would send a GET again after its connection broke.
type empty struct{}

func (empty) Read([]byte) (int, error) { return 0, io.EOF }
func (empty) Close() error             { return nil }

// WriteTo spares the copying of nothing.
func (empty) WriteTo(io.Writer) (int64, error) { return 0, nil }
