// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"bytes"
	"math"
	"reflect"
	"testing"

	"pgregory.net/rapid"
)

func TestValuesComeBack(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		in := rapid.SliceOf(rapid.OneOf(
			rapid.Just[any](nil), rapid.Map(rapid.Int64(), func(v int64) any { return v }), rapid.Map(rapid.Float64(), func(v float64) any { return v }),
			rapid.Map(rapid.String(), func(v string) any { return v }), rapid.Map(rapid.SliceOf(rapid.Byte()), func(v []byte) any { return append([]byte{}, v...) }))).Draw(rt, "values")
		b, err := appendValues(nil, in)
		if err != nil {
			rt.Fatal(err)
		}
		out, rest, err := readValues(b, len(in))
		if err != nil || len(rest) > 0 || !reflect.DeepEqual(in, out) {
			rt.Fatalf("%v became %v, %v", in, out, err)
		}
		if len(in) > 0 && len(b) > 0 {
			if _, _, err := readValues(b[:len(b)-1], len(in)); err == nil {
				rt.Fatal("cut values still read")
			}
		}
	})
	if b, err := appendValue(nil, math.Inf(-1)); err != nil || len(b) != 9 {
		t.Error(b, err)
	}
	if _, err := appendValue(nil, true); err == nil {
		t.Error("a bool was taken")
	}
}

func FuzzReadValues(f *testing.F) {
	f.Add([]byte("nt\x03abcb\x00i\x02r12345678"))
	f.Add([]byte("t\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, in []byte) {
		rest := in
		for len(rest) > 0 {
			v, next, err := readValue(rest)
			if err != nil {
				return
			}
			if b, ok := v.([]byte); ok && !bytes.Contains(in, b) {
				t.Fatal("bytes out of nowhere")
			}
			rest = next
		}
	})
}
