// SPDX-License-Identifier: Apache-2.0

package hostname

import (
	"net/url"
	"testing"
)

func TestPrivate(t *testing.T) {
	for address, want := range map[string]bool{
		"https://example.com": true, "https://127.0.0.1:1/x": true, "http://localhost:8080": true, "http://127.0.0.2": true, "http://[::1]:1": true,
		"http://example.com": false, "http://localhost.example.com": false, "http://127.0.0.1.example.com": false, "http://0.0.0.0": false, "http://10.0.0.1": false,
		"http://": false, "ftp://localhost": false, "localhost": false, "//localhost": false, "file:///localhost": false,
	} {
		u, err := url.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		if Private(u) != want {
			t.Errorf("%s: %t", address, !want)
		}
	}
}
