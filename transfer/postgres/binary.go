// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/cloister-dev/cloister/transfer"
)

// COPY's binary format: a head, rows that are a count of fields and, for each field, its
// length (-1: NULL) and its bytes, and an end.
var (
	binaryHead = append([]byte("PGCOPY\n\xff\r\n\x00"), 0, 0, 0, 0, 0, 0, 0, 0)
	binaryEnd  = []byte{0xff, 0xff}
)

// binaryTypes are those whose binary form is the same in every database and version:
// nothing of it is an OID of the catalog, and no extension made it.
var binaryTypes = []string{"bool", "int2", "int4", "int8", "float4", "float8", "numeric", "text", "varchar", "bytea", "uuid", "json", "jsonb",
	"date", "time", "timetz", "timestamp", "timestamptz", "interval", "inet", "cidr", "macaddr"}

// binaryKeys are those of them that a key may have: where a copy goes on is text.
var binaryKeys = []string{"int2", "int4", "int8", "text", "varchar", "uuid"}

// firstUserOID is above those of the types that every database has.
const firstUserOID = 16384

// binary reports whether the table's rows may travel in binary form.
func (t *table) binary() bool {
	for i, c := range t.cols {
		types := binaryTypes
		if slices.Contains(t.keyAt, i) {
			types = binaryKeys
		}
		if c.oid >= firstUserOID || !slices.Contains(types, c.base) {
			return false
		}
	}
	return len(t.cols) > 0
}

// copyOptions and copyReader are for a COPY FROM of rows in that form.
func copyOptions(form string) string {
	if form == transfer.FormBinary {
		return " (FORMAT binary)"
	}
	return ""
}

func copyReader(form string, data []byte) io.Reader {
	if form == transfer.FormBinary {
		return io.MultiReader(bytes.NewReader(binaryHead), bytes.NewReader(data), bytes.NewReader(binaryEnd))
	}
	return bytes.NewReader(data)
}

// knownForm fails for a form that a newer build may send, and for what the columns are not
// fit for.
func (t *table) knownForm(form string) error {
	if form == "" || form == transfer.FormBinary && t.binary() {
		return nil
	}
	return fmt.Errorf("%w: rows of table %s in form %q", errShort, t.Name, form)
}

// tuples cuts the binary output of COPY into batches of whole rows.
type tuples struct {
	packer
	begun bool // the head was read
	ended bool // the end was
}

// Write implements io.Writer; the error of yield ends the copy.
func (l *tuples) Write(p []byte) (int, error) {
	l.buf = append(l.buf, p...)
	if !l.begun {
		if len(l.buf) < len(binaryHead) {
			return len(p), nil
		}
		if !bytes.HasPrefix(l.buf, binaryHead) {
			l.err = fmt.Errorf("%w: COPY begins with %x", errShort, l.buf[:len(binaryHead)])
			return 0, l.err
		}
		l.begun = true
		l.buf = l.buf[:copy(l.buf, l.buf[len(binaryHead):])]
	}
	for {
		n, end := rowSize(l.buf[l.scan:], len(l.t.cols))
		switch {
		case n < 0:
			l.err = errShort
			return 0, l.err
		case end:
			l.ended = true
			return len(p), nil
		case n > transfer.MaxRowBytes || n == 0 && len(l.buf)-l.scan > transfer.MaxRowBytes:
			l.err = tooLarge(l.t, max(n, len(l.buf)-l.scan))
			return 0, l.err
		case n == 0:
			return len(p), nil
		}
		if l.err = l.row(l.scan + n); l.err != nil {
			return 0, l.err
		}
	}
}

// rowSize is the size of the row at the beginning of b: 0 when it is not all there, -1 when
// it has not that many fields. end says that there is none any more.
func rowSize(b []byte, fields int) (n int, end bool) {
	if len(b) < 2 {
		return 0, false
	}
	if bytes.HasPrefix(b, binaryEnd) {
		return 0, true
	}
	if int(binary.BigEndian.Uint16(b)) != fields {
		return -1, false
	}
	at := 2
	for range fields {
		if len(b) < at+4 {
			return 0, false
		}
		size := int32(binary.BigEndian.Uint32(b[at:]))
		if size < -1 {
			return -1, false
		}
		at += 4 + int(max(size, 0))
	}
	if len(b) < at {
		return 0, false
	}
	return at, false
}

// tupleKey returns the key of a whole row, as text.
func (t *table) tupleKey(row []byte) ([]string, error) {
	key := make([]string, len(t.keyAt))
	for i, want := range t.keyAt {
		at := 2
		for range want {
			at += 4 + int(max(int32(binary.BigEndian.Uint32(row[at:])), 0))
		}
		size := int32(binary.BigEndian.Uint32(row[at:]))
		if size < 0 {
			return nil, errShort
		}
		var err error
		if key[i], err = keyText(t.cols[want].base, row[at+4:at+4+int(size)]); err != nil {
			return nil, err
		}
	}
	return key, nil
}

func keyText(base string, v []byte) (string, error) {
	switch {
	case base == "text" || base == "varchar":
		return string(v), nil
	case base == "int2" && len(v) == 2:
		return strconv.Itoa(int(int16(binary.BigEndian.Uint16(v)))), nil
	case base == "int4" && len(v) == 4:
		return strconv.Itoa(int(int32(binary.BigEndian.Uint32(v)))), nil
	case base == "int8" && len(v) == 8:
		return strconv.FormatInt(int64(binary.BigEndian.Uint64(v)), 10), nil
	case base == "uuid" && len(v) == 16:
		h := hex.EncodeToString(v)
		return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:], nil
	}
	return "", errShort
}

func (l *tuples) end() error {
	if l.err == nil && (!l.ended || l.scan+len(binaryEnd) != len(l.buf)) {
		return errShort
	}
	return l.packer.end()
}
