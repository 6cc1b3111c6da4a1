// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
)

func isEventStream(h http.Header) bool {
	const want = "text/event-stream"
	ct := h.Get("Content-Type")
	if len(ct) < len(want) || !strings.EqualFold(ct[:len(want)], want) {
		return false
	}
	return len(ct) == len(want) || ct[len(want)] == ';' || ct[len(want)] == ' '
}

// endable makes an answer's body end, as if its sender had ended it, when ending
// does; trailer is what it ends with then.
func endable(ending context.Context, resp *http.Response, trailer http.Header) io.ReadCloser {
	e := &endableBody{ReadCloser: resp.Body, resp: resp, trailer: trailer}
	e.stop = context.AfterFunc(ending, func() {
		e.ended.Store(true)
		_ = e.ReadCloser.Close()
	})
	return e
}

type endableBody struct {
	io.ReadCloser
	resp    *http.Response
	trailer http.Header
	ended   atomic.Bool
	stop    func() bool
}

func (e *endableBody) Read(p []byte) (int, error) {
	n, err := e.ReadCloser.Read(p)
	if err != nil && err != io.EOF && e.ended.Load() {
		if e.trailer != nil {
			e.resp.Trailer = e.trailer
		}
		return n, io.EOF
	}
	return n, err
}

func (e *endableBody) Close() error {
	e.stop()
	return e.ReadCloser.Close()
}
