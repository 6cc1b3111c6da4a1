// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"context"
	"io"
	"mime"
	"net/http"
	"sync/atomic"
)

func isEventStream(h http.Header) bool {
	t, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	return err == nil && t == "text/event-stream"
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
