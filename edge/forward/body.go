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

// Body is a request's body that can be sent more than once as long as what was
// read of it is recorded: up to limit bytes, and within the budget. Past that it
// goes on, but only once. It has no goroutine.
type Body struct {
	src    io.Reader
	limit  int
	budget *Budget
	onEOF  func()

	mu      sync.Mutex // guards what follows
	turn    *sync.Cond // a read of src ended, or an attempt did
	buf     []byte     // what was read of src; nil once lost
	charged int64      // bytes of budget
	read    int64      // bytes read of src
	lost    bool       // more was read than is recorded
	done    bool       // no further attempt
	err     error      // how src ended
	reading bool       // an attempt is in src.Read
	cur     *attempt
}

// NewBody wraps a request's body. onEOF, if set, is called once when src has been
// read to its end, before the reader learns of it.
func NewBody(src io.Reader, limit int, budget *Budget, onEOF func()) *Body {
	b := &Body{src: src, limit: limit, budget: budget, onEOF: onEOF}
	b.turn = sync.NewCond(&b.mu)
	return b
}

// Attempt ends the attempt before and returns the body from its start. It returns
// nil when the start is lost or the body was released.
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
	if b.cur == nil || b.cur.off >= int64(len(b.buf)) {
		b.forget()
	}
}

// Close ends the present attempt and forgets everything. A read of the source that
// is under way is not waited for; no other begins.
func (b *Body) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done = true
	if b.cur != nil {
		b.cur.closed = true
		b.cur = nil
	}
	b.forget()
	b.turn.Broadcast()
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

// record keeps p for another attempt, or gives up on that; mu is held.
func (b *Body) record(p []byte) {
	b.read += int64(len(p))
	if b.lost || len(p) == 0 {
		return
	}
	if b.done || len(b.buf)+len(p) > b.limit {
		b.forget()
		return
	}
	need := int64(len(b.buf)+len(p)) - b.charged
	if need > 0 {
		// Charged in steps, so that small reads do not contend for the budget.
		need = (need + 4095) &^ 4095
		if b.budget != nil && !b.budget.take(need) {
			b.forget()
			return
		}
		b.charged += need
	}
	b.buf = append(b.buf, p...)
}

// attempt is one reading of a Body. Its fields are guarded by b.mu.
type attempt struct {
	b      *Body
	off    int64
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
		case a.off < int64(len(b.buf)):
			n := copy(p, b.buf[a.off:])
			a.off += int64(n)
			if b.done && a.off >= int64(len(b.buf)) {
				b.forget()
			}
			return n, nil
		case a.off < b.read:
			return 0, ErrAbandoned // another attempt's read lost the record meanwhile
		case b.err != nil:
			return 0, b.err
		case len(p) == 0:
			return 0, nil
		case b.reading:
			b.turn.Wait() // an abandoned attempt is still in src.Read; its bytes are recorded
			continue
		}
		b.reading = true
		b.mu.Unlock()
		n, err := b.src.Read(p)
		b.mu.Lock()
		b.reading = false
		b.record(p[:n])
		if err != nil {
			b.err = err
			if err == io.EOF && b.onEOF != nil {
				b.onEOF()
			}
		}
		b.turn.Broadcast()
		if a.closed {
			return 0, ErrAbandoned
		}
		a.off += int64(n)
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// Close ends the attempt. The source stays open.
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
