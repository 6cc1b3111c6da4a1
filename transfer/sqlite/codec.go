// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/cloister-dev/cloister/cells"
)

// A value is one byte for its storage class and what it holds, so that it comes
// out as it went in: text is not made a blob, nor an integer a real.
const (
	tagNull = 'n'
	tagInt  = 'i' // zigzag varint
	tagReal = 'r' // 8 bytes
	tagText = 't' // length, bytes
	tagBlob = 'b' // length, bytes
	// tagGone and tagRow stand before a change: the key is gone, or the row follows.
	tagGone = 'G'
	tagRow  = 'R'
)

func appendValue(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return append(b, tagNull), nil
	case int64:
		return binary.AppendVarint(append(b, tagInt), v), nil
	case float64:
		return binary.BigEndian.AppendUint64(append(b, tagReal), math.Float64bits(v)), nil
	case string:
		b = binary.AppendUvarint(append(b, tagText), uint64(len(v)))
		return append(b, v...), nil
	case []byte:
		b = binary.AppendUvarint(append(b, tagBlob), uint64(len(v)))
		return append(b, v...), nil
	}
	return nil, fmt.Errorf("transfer/sqlite: the driver gave a %T", v)
}

func appendValues(b []byte, vs []any) ([]byte, error) {
	var err error
	for _, v := range vs {
		if b, err = appendValue(b, v); err != nil {
			return nil, err
		}
	}
	return b, nil
}

var errShort = fmt.Errorf("%w: transfer/sqlite: malformed rows", cells.ErrInvalid)

func readValue(b []byte) (any, []byte, error) {
	if len(b) == 0 {
		return nil, nil, errShort
	}
	tag, b := b[0], b[1:]
	switch tag {
	case tagNull:
		return nil, b, nil
	case tagInt:
		v, n := binary.Varint(b)
		if n <= 0 {
			return nil, nil, errShort
		}
		return v, b[n:], nil
	case tagReal:
		if len(b) < 8 {
			return nil, nil, errShort
		}
		return math.Float64frombits(binary.BigEndian.Uint64(b)), b[8:], nil
	case tagText, tagBlob:
		n, w := binary.Uvarint(b)
		if w <= 0 || n > uint64(len(b)-w) {
			return nil, nil, errShort
		}
		data := b[w : w+int(n)]
		if tag == tagText {
			return string(data), b[w+int(n):], nil
		}
		return append(make([]byte, 0, len(data)), data...), b[w+int(n):], nil
	}
	return nil, nil, errShort
}

func readValues(b []byte, n int) ([]any, []byte, error) {
	out := make([]any, n)
	var err error
	for i := range out {
		if out[i], b, err = readValue(b); err != nil {
			return nil, nil, err
		}
	}
	return out, b, nil
}
