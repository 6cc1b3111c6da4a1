// SPDX-License-Identifier: Apache-2.0

package receipt

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/cloister-dev/cloister/cells"
)

// maxDepth bounds how deep a document may be nested.
const maxDepth = 32

// Canonical returns the canonical form of a JSON document, as RFC 8785 has it:
// members sorted by the UTF-16 of their names, no white space, strings with the
// fewest escapes. Numbers must be integers within 64 bits, written plainly: they keep
// their digits. Names that occur twice, bytes that are not UTF-8 and anything behind
// the document are refused with [cells.ErrInvalid].
func Canonical(doc []byte) ([]byte, error) {
	if !utf8.Valid(doc) {
		return nil, fmt.Errorf("%w: receipt: not UTF-8", cells.ErrInvalid)
	}
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	var out bytes.Buffer
	if err := canonical(dec, &out, maxDepth); err != nil {
		return nil, fmt.Errorf("%w: receipt: %w", cells.ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: receipt: more than one document", cells.ErrInvalid)
	}
	return out.Bytes(), nil
}

func canonical(dec *json.Decoder, out *bytes.Buffer, depth int) error {
	if depth == 0 {
		return errors.New("nested too deeply")
	}
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	switch v := tok.(type) {
	case json.Delim:
		if v == '[' {
			return array(dec, out, depth)
		}
		return object(dec, out, depth)
	case string:
		writeString(out, v)
	case json.Number:
		return writeNumber(out, v.String())
	case bool:
		out.WriteString(strconv.FormatBool(v))
	case nil:
		out.WriteString("null")
	}
	return nil
}

func array(dec *json.Decoder, out *bytes.Buffer, depth int) error {
	out.WriteByte('[')
	for i := 0; dec.More(); i++ {
		if i > 0 {
			out.WriteByte(',')
		}
		if err := canonical(dec, out, depth-1); err != nil {
			return err
		}
	}
	out.WriteByte(']')
	_, err := dec.Token()
	return err
}

func object(dec *json.Decoder, out *bytes.Buffer, depth int) error {
	type member struct {
		name  string
		value []byte
	}
	var members []member
	seen := map[string]bool{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		name, _ := tok.(string) // a decoder gives nothing else here
		if seen[name] {
			return fmt.Errorf("member %q occurs twice", name)
		}
		seen[name] = true
		var value bytes.Buffer
		if err := canonical(dec, &value, depth-1); err != nil {
			return err
		}
		members = append(members, member{name, value.Bytes()})
	}
	if _, err := dec.Token(); err != nil {
		return err
	}
	slices.SortFunc(members, func(a, b member) int {
		return slices.Compare(utf16.Encode([]rune(a.name)), utf16.Encode([]rune(b.name)))
	})
	out.WriteByte('{')
	for i, m := range members {
		if i > 0 {
			out.WriteByte(',')
		}
		writeString(out, m.name)
		out.WriteByte(':')
		out.Write(m.value)
	}
	out.WriteByte('}')
	return nil
}

func writeNumber(out *bytes.Buffer, s string) error {
	_, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		_, err = strconv.ParseUint(s, 10, 64)
	}
	if err != nil || s == "-0" {
		return fmt.Errorf("number %s is no plain integer of 64 bits", s)
	}
	out.WriteString(s)
	return nil
}

func writeString(out *bytes.Buffer, s string) {
	const short = "\b\t\n\f\r"
	out.WriteByte('"')
	for _, r := range s {
		switch i := strings.IndexRune(short, r); {
		case r == '"' || r == '\\':
			out.WriteByte('\\')
			out.WriteRune(r)
		case i >= 0:
			out.WriteByte('\\')
			out.WriteByte("btnfr"[i])
		case r < 0x20:
			fmt.Fprintf(out, "\\u%04x", r)
		default:
			out.WriteRune(r)
		}
	}
	out.WriteByte('"')
}
