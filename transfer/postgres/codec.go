// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Changes are a sequence of operations. opTable names the table of those behind it.
const (
	opTable  = 'T' // name
	opInsert = 'I' // row
	opUpdate = 'U' // row; the key is as before
	opRekey  = 'K' // old key, row
	opDelete = 'D' // key
)

// Values are a byte and, for text, a length and the text.
const (
	valNull      = 'n'
	valUnchanged = 'u' // a large value that the change does not carry
	valText      = 't'
)

// value is one column of a change. Text is nil for NULL, unless unchanged.
type value struct {
	text      *string
	unchanged bool
}

func appendText(b []byte, s []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

var errShort = fmt.Errorf("%w: transfer/postgres: malformed changes", cells.ErrInvalid)

func readText(b []byte) (string, []byte, error) {
	n, w := binary.Uvarint(b)
	if w <= 0 || n > uint64(len(b)-w) {
		return "", nil, errShort
	}
	return string(b[w : w+int(n)]), b[w+int(n):], nil
}

// readTexts reads a key of n values.
func readTexts(b []byte, n int) ([]string, []byte, error) {
	out := make([]string, n)
	var err error
	for i := range out {
		if out[i], b, err = readText(b); err != nil {
			return nil, nil, err
		}
	}
	return out, b, nil
}

func encodeKey(key []string) []byte {
	out := []byte{}
	for _, k := range key {
		out = appendText(out, []byte(k))
	}
	return out
}

func readRow(b []byte, n int) ([]value, []byte, error) {
	out := make([]value, n)
	for i := range out {
		if len(b) == 0 {
			return nil, nil, errShort
		}
		tag := b[0]
		b = b[1:]
		switch tag {
		case valNull:
		case valUnchanged:
			out[i].unchanged = true
		case valText:
			var s string
			var err error
			if s, b, err = readText(b); err != nil {
				return nil, nil, err
			}
			out[i].text = &s
		default:
			return nil, nil, errShort
		}
	}
	return out, b, nil
}

// op is one decoded change.
type op struct {
	kind byte
	t    *table
	key  []string // of the row now; the old one for opDelete
	old  []string // for opRekey
	row  []value  // by t.cols
}

// whole reports whether the row has a value for every column.
func (o *op) whole() bool {
	for _, v := range o.row {
		if v.unchanged {
			return false
		}
	}
	return true
}

func (t *table) keyOf(row []value) ([]string, error) {
	key := make([]string, len(t.keyAt))
	for i, at := range t.keyAt {
		if row[at].text == nil {
			return nil, fmt.Errorf("%w: transfer/postgres: a change of table %s lacks its key", cells.ErrInvalid, t.Name)
		}
		key[i] = *row[at].text
	}
	return key, nil
}

// decode reads the operations of a batch.
func (c *catalog) decode(data []byte) (ops []op, err error) {
	var t *table
	for len(data) > 0 {
		o := op{kind: data[0], t: t}
		data = data[1:]
		if o.kind == opTable {
			var name string
			if name, data, err = readText(data); err == nil {
				t, err = c.table(name)
			}
			if err != nil {
				return nil, err
			}
			continue
		}
		if t == nil {
			return nil, errShort
		}
		switch o.kind {
		case opRekey:
			if o.old, data, err = readTexts(data, len(t.keys)); err != nil {
				return nil, err
			}
			fallthrough
		case opInsert, opUpdate:
			if o.row, data, err = readRow(data, len(t.cols)); err == nil {
				o.key, err = t.keyOf(o.row)
			}
		case opDelete:
			o.key, data, err = readTexts(data, len(t.keys))
		default:
			err = errShort
		}
		if err != nil {
			return nil, err
		}
		ops = append(ops, o)
	}
	return ops, nil
}

// unescape undoes COPY's text format of one field; null for \N.
func unescape(f []byte) (s string, null bool) {
	if string(f) == `\N` {
		return "", true
	}
	out := make([]byte, 0, len(f))
	for i := 0; i < len(f); i++ {
		if f[i] != '\\' || i+1 == len(f) {
			out = append(out, f[i])
			continue
		}
		i++
		switch f[i] {
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'v':
			out = append(out, '\v')
		default:
			out = append(out, f[i])
		}
	}
	return string(out), false
}

// lineKey returns the key of a row in COPY's text format, with the columns of t.cols.
func (t *table) lineKey(line []byte) ([]string, error) {
	key := make([]string, len(t.keyAt))
	for i, at := range t.keyAt {
		rest := line
		for range at {
			n := bytes.IndexByte(rest, '\t')
			if n < 0 {
				return nil, errShort
			}
			rest = rest[n+1:]
		}
		if n := bytes.IndexByte(rest, '\t'); n >= 0 {
			rest = rest[:n]
		}
		var null bool
		if key[i], null = unescape(rest); null {
			return nil, errShort
		}
	}
	return key, nil
}

// packer makes batches of whole rows.
type packer struct {
	t     *table
	form  string
	buf   []byte
	last  int // where the last whole row in buf begins
	scan  int // where it ends
	count int64
	key   func(row []byte) ([]string, error)
	yield func(transfer.Batch) error
	held  *transfer.Batch // kept back so that the last one can say so
	err   error
}

// batchRows bounds the rows of one batch.
const batchRows = 5000

// row takes the row that begins where the last one ended.
func (l *packer) row(end int) error {
	l.last, l.scan = l.scan, end
	if l.count++; end >= transfer.BatchBytes || l.count >= batchRows {
		return l.flush()
	}
	return nil
}

func (l *packer) flush() error {
	if l.count == 0 {
		return nil
	}
	key, err := l.key(l.buf[l.last:l.scan])
	if err != nil {
		return err
	}
	b := transfer.Batch{Table: l.t.Name, Form: l.form, Data: l.buf[:l.scan:l.scan], Count: l.count, LastKey: encodeKey(key)}
	rest := l.buf[l.scan:]
	size := len(rest)
	if l.scan >= transfer.BatchBytes { // more will come
		size = max(size, transfer.BatchBytes+transfer.BatchBytes/8)
	}
	l.buf = append(make([]byte, 0, size), rest...)
	l.last, l.scan, l.count = 0, 0, 0
	if l.held != nil {
		err = l.yield(*l.held)
	}
	l.held = &b
	return err
}

// end yields what is left, marked as the last.
func (l *packer) end() error {
	if err := l.flush(); err != nil {
		return err
	}
	if l.held == nil {
		l.held = &transfer.Batch{Table: l.t.Name}
	}
	l.held.End = true
	return l.yield(*l.held)
}

func tooLarge(t *table, n int) error {
	return fmt.Errorf("%w: a row of table %s has %d bytes", transfer.ErrTooLarge, t.Name, n)
}

// lines cuts the output of COPY, in text, into batches of whole rows.
type lines struct{ packer }

func newLines(t *table, yield func(transfer.Batch) error) *lines {
	return &lines{packer{t: t, yield: yield, key: func(row []byte) ([]string, error) { return t.lineKey(row[:len(row)-1]) }}}
}

func newTuples(t *table, yield func(transfer.Batch) error) *tuples {
	return &tuples{packer: packer{t: t, form: transfer.FormBinary, yield: yield, key: t.tupleKey}}
}

// Write implements io.Writer; the error of yield ends the copy.
func (l *lines) Write(p []byte) (int, error) {
	l.buf = append(l.buf, p...)
	for {
		n := bytes.IndexByte(l.buf[l.scan:], '\n')
		if n < 0 {
			return len(p), nil
		}
		if n > transfer.MaxRowBytes {
			l.err = tooLarge(l.t, n)
			return 0, l.err
		}
		if l.err = l.row(l.scan + n + 1); l.err != nil {
			return 0, l.err
		}
	}
}
