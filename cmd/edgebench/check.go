// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// check makes sure that a proxy does what all are to do: it sends each tenant to its cell
// and sets the headers, whatever the client says of them. By gRPC the calls' success is
// all that is looked at, as the backend is not this one.
func (b *bench) check(ctx context.Context, p *peer) error {
	if b.kind == "grpc" {
		return nil
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for i := range 2 * cellCount {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:"+strconv.Itoa(p.port)+pathHead, nil)
		if err != nil {
			return err
		}
		req.Host = "api.example.com"
		req.Header.Set(tenantHeader, tenantName(i))
		for _, name := range []string{cells.HeaderTenant, cells.HeaderEpoch, cells.HeaderAdmission, "X-Forwarded-For"} {
			req.Header.Set(name, "of-the-client")
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s %q", tenantName(i), resp.Status, body)
		}
		_, head, _ := strings.Cut(string(body), "\r\n")
		got, err := textproto.NewReader(bufio.NewReader(strings.NewReader(head + "\r\n"))).ReadMIMEHeader()
		if err != nil {
			return fmt.Errorf("%s: %q: %w", tenantName(i), body, err)
		}
		h := http.Header(got)
		for name, want := range map[string]string{
			"Port": strconv.Itoa(b.cells[cellOf(i)]), cells.HeaderTenant: tenantName(i), cells.HeaderEpoch: "1", "X-Forwarded-For": "127.0.0.1",
			"Host": "api.example.com", "X-Forwarded-Host": "api.example.com", "X-Forwarded-Proto": "http",
		} {
			if v := h.Values(name); len(v) != 1 || v[0] != want {
				return fmt.Errorf("%s: %s is %q, want %q", tenantName(i), name, v, want)
			}
		}
		if v := h.Values(cells.HeaderAdmission); len(v) != 1 || len(v[0]) != len(admission) {
			return fmt.Errorf("%s: the token is %q, want one of %d bytes", tenantName(i), v, len(admission))
		}
	}
	return nil
}
