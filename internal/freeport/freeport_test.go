// SPDX-License-Identifier: Apache-2.0

package freeport

import (
	"net"
	"strconv"
	"testing"
)

func TestPort(t *testing.T) {
	low, high := bounds()
	seen := map[int]bool{}
	for range 50 {
		p, err := Port()
		if err != nil {
			t.Fatal(err)
		}
		if seen[p] || p < low || p >= high {
			t.Fatalf("port %d of %d to %d, seen %v", p, low, high, seen[p])
		}
		seen[p] = true
		// Another process of this user does not get it.
		if f, err := claim(p); err == nil {
			f.Close()
			t.Fatalf("port %d could be claimed twice", p)
		}
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p)))
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	// What the kernel hands out is never among them.
	for range 50 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if p := l.Addr().(*net.TCPAddr).Port; p >= low && p < high {
			t.Errorf("the kernel gave port %d of %d to %d", p, low, high)
		}
		l.Close()
	}
}
