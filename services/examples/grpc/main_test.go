// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	want := `call:   hello ann, from cell-a
stream: hello ann, from cell-a
call:   hello bob, from cell-b
stream: ended, Unavailable - again
stream: hello bob, from cell-b
call:   hello cy, from cell-b
stream: hello cy, from cell-b
`
	if out.String() != want {
		t.Errorf("%s, want %s", out.String(), want)
	}
}
