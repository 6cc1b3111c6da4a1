// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"encoding/binary"
	"io"
	"net/http"
	"sync"
	"time"
)

// requestBody cleans the trailers that come at its end.
type requestBody struct {
	io.ReadCloser
	trailer func() http.Header
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		clean(b.trailer())
	}
	return n, err
}

// frames counts the messages of one side of a gRPC call as they pass: five bytes of
// head, then as many as the last four of them say. Where a second one begins, the
// call is a stream; and where the first one is complete and the call goes on for long.
type frames struct {
	io.ReadCloser
	second func()
	// after, if not 0, is how long the side may go on behind its first message before
	// second is called as well.
	after time.Duration

	mu   sync.Mutex // guards late and over; a body is closed while it is read
	late *time.Timer
	over bool

	seen int
	head [5]byte
	have int    // bytes of head
	left uint32 // bytes of the message that are still to come
}

func (f *frames) Read(p []byte) (int, error) {
	n, err := f.ReadCloser.Read(p)
	if f.seen < 2 {
		f.count(p[:n])
	}
	if err != nil {
		f.stop()
	}
	return n, err
}

// Close implements [io.Closer].
func (f *frames) Close() error {
	f.stop()
	return f.ReadCloser.Close()
}

func (f *frames) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
	if f.late != nil {
		f.late.Stop()
	}
}

// first is called behind the first message.
func (f *frames) first() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.after > 0 && f.late == nil && !f.over {
		f.late = time.AfterFunc(f.after, f.second)
	}
}

func (f *frames) count(b []byte) {
	for len(b) > 0 {
		if f.left > 0 {
			skip := min(uint64(f.left), uint64(len(b)))
			f.left -= uint32(skip)
			b = b[skip:]
			if f.left == 0 {
				f.first()
			}
			continue
		}
		if f.have == 0 {
			if f.seen++; f.seen == 2 {
				f.second()
				return
			}
		}
		took := copy(f.head[f.have:], b)
		f.have += took
		b = b[took:]
		if f.have == len(f.head) {
			if f.left, f.have = binary.BigEndian.Uint32(f.head[1:]), 0; f.left == 0 {
				f.first()
			}
		}
	}
}

// endable makes an answer end, as if the service had ended it, when the gate has
// closed on the request.
type endable struct {
	io.ReadCloser
	c    *call
	resp *http.Response
}

func (e *endable) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err == nil || err == io.EOF {
		if err == io.EOF {
			clean(e.resp.Trailer)
		}
		return n, err
	}
	if e.c.gateClosed() {
		if e.c.grpc {
			e.resp.Trailer = http.Header{"Grpc-Status": {"14"}, "Grpc-Message": {"the tenant is moving to another cell"}}
		}
		return n, io.EOF
	}
	return n, err
}
