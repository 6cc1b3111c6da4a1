// SPDX-License-Identifier: Apache-2.0

package fleet

import "testing"

func TestExpand(t *testing.T) {
	words := map[string]string{"listen": "127.0.0.1:1", "dsn": "{odd}"}
	for in, want := range map[string]string{"": "", "x": "x", "--listen={listen}": "--listen=127.0.0.1:1", "{dsn}/{dsn}": "{odd}/{odd}"} {
		if got, err := expand(in, words); err != nil || got != want {
			t.Errorf("expand(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"{listne}", "{", "{}", "a{listen"} {
		if got, err := expand(in, words); err == nil {
			t.Errorf("expand(%q) = %q; want an error", in, got)
		}
	}
}
