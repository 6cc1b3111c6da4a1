// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"
)

// BenchmarkEdge is the whole way through an edge and a gate, beside a plain
// ReverseProxy in front of the same handler, and beside the handler alone.
func BenchmarkEdge(b *testing.B) {
	service := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "hello")
	})
	f := newFleet(b, fleetOptions{handler: service})
	f.place("acme", "a")
	plain := httptest.NewServer(service)
	defer plain.Close()
	target, err := url.Parse(plain.URL)
	if err != nil {
		b.Fatal(err)
	}
	tr := &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}
	defer tr.CloseIdleConnections()
	peer := httptest.NewServer(&httputil.ReverseProxy{Transport: tr, Rewrite: func(pr *httputil.ProxyRequest) {
		pr.SetURL(target)
		pr.SetXForwarded()
	}})
	defer peer.Close()
	for _, c := range []struct{ name, url string }{{"edge", f.url}, {"reverseproxy", peer.URL}, {"direct", plain.URL}} {
		for _, body := range []struct {
			name string
			data []byte
		}{{"get", nil}, {"post1k", make([]byte, 1<<10)}, {"post1m", make([]byte, 1<<20)}} {
			b.Run(c.name+"/"+body.name, func(b *testing.B) {
				b.SetBytes(int64(len(body.data)))
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						method, rd := "GET", io.Reader(nil)
						if body.data != nil {
							method, rd = "POST", bytes.NewReader(body.data)
						}
						r, err := http.NewRequest(method, c.url+"/v1/x", rd)
						if err != nil {
							b.Error(err)
							return
						}
						r.Header.Set("X-Tenant", "acme")
						resp, err := f.http.Do(r)
						if err != nil {
							b.Error(err)
							return
						}
						_, _ = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
						if resp.StatusCode != 200 {
							b.Error(resp.Status)
							return
						}
					}
				})
			})
		}
	}
}
