// SPDX-License-Identifier: Apache-2.0

package cli

import "testing"

// Only an address of the web is handed to what opens it.
func TestOpener(t *testing.T) {
	for address, want := range map[string]bool{"https://x.example/a?b=c": true, "http://127.0.0.1:1/": true,
		"--help": false, "-a": false, "file:///etc/passwd": false, "smb://x.example/s": false, "http://x.example/": false, "": false} {
		x := opener(address)
		if (x != nil) != want || want && x.Args[len(x.Args)-1] != address {
			t.Errorf("%q: %v", address, x)
		}
	}
}
