// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"fmt"
	"strings"
)

// How the tenants are spread. Every proxy has the same map.
const (
	tenants      = 1000
	cellCount    = 4
	tenantHeader = "X-Tenant"
)

func tenantName(i int) string { return fmt.Sprintf("tenant-%04d", i) }
func cellName(i int) string   { return fmt.Sprintf("cell-%d", i) }

// cellOf is the cell of the i-th tenant.
func cellOf(i int) int { return i % cellCount }

// requestsOf makes one request for each tenant, in an order in which neighbours go to
// different cells.
func requestsOf(method, path string, body int) [][]byte {
	out := make([][]byte, tenants)
	for i := range out {
		var b strings.Builder
		fmt.Fprintf(&b, "%s %s?item=%d HTTP/1.1\r\nHost: api.example.com\r\nUser-Agent: edgebench/1\r\nAccept: application/json\r\n%s: %s\r\n",
			method, path, i, tenantHeader, tenantName(i))
		if method == "POST" {
			fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", body)
		}
		b.WriteString("\r\n")
		b.Write(bytes.Repeat([]byte("y"), body))
		out[i] = []byte(b.String())
	}
	return out
}
