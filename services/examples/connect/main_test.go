// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	for name, opts := range map[string][]connect.ClientOption{"connect": nil, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()}} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := run(t.Context(), &out, opts...); err != nil {
				t.Fatal(err)
			}
			want := `call:   hello ann, from cell-a
stream: 1 from cell-a
stream: ended, unavailable
call:   hello ann, from cell-b
stream: 1 from cell-b
stream: ended, unavailable
`
			if out.String() != want {
				t.Errorf("%s, want %s", out.String(), want)
			}
		})
	}
}
