// SPDX-License-Identifier: Apache-2.0

package receipt

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/cloister-dev/cloister/cells"
)

// Format and Version begin every receipt.
const (
	Format  = "cloister-receipt"
	Version = 1
	context = "cloister-receipt-v1\n"
	// MaxSize bounds a receipt, in bytes.
	MaxSize = 16 << 20
)

// ErrUnverified: a receipt is not what was signed, or not by a key that is trusted.
var ErrUnverified = errors.New("receipt: does not verify")

// Receipt is a receipt as it is handed out.
type Receipt struct {
	Format  string       `json:"format"`
	Version int          `json:"version"`
	Move    cells.MoveID `json:"move"`
	Entries []Entry      `json:"entries"`
}

// Entry is a signed statement. Body is a [Statement] in JSON; Key the [KeyID] of the
// key that made Signature, which is in standard base64.
type Entry struct {
	Body      json.RawMessage `json:"body"`
	Key       string          `json:"key"`
	Signature string          `json:"signature"`
}

// KeyID names a key: the first half of the SHA-256 of its 32 bytes, in hexadecimal.
func KeyID(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(pub)
	return hex.EncodeToString(sum[:16])
}

// New makes a receipt of stored entries, as [Append] made them.
func New(move cells.MoveID, entries [][]byte) (Receipt, error) {
	r := Receipt{Format: Format, Version: Version, Move: move, Entries: make([]Entry, len(entries))}
	for i, b := range entries {
		if err := strict(b, &r.Entries[i]); err != nil {
			return r, fmt.Errorf("entry %d: %w", i, err)
		}
	}
	return r, nil
}

// Append signs s as the statement that follows the entries so far, and returns its
// entry. N and Prev are set here.
func Append(key ed25519.PrivateKey, entries [][]byte, s Statement) ([]byte, error) {
	s.N, s.Prev = len(entries), ""
	if s.N > 0 {
		var last Entry
		if err := strict(entries[s.N-1], &last); err != nil {
			return nil, err
		}
		var before Statement
		if err := strict(last.Body, &before); err != nil {
			return nil, err
		}
		if before.End != nil {
			return nil, fmt.Errorf("%w: receipt: it has ended", cells.ErrInvalid)
		}
		message, err := signed(last.Body)
		if err != nil {
			return nil, err
		}
		s.Prev = hash(message)
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	raw, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("%w: receipt: %w", cells.ErrInvalid, err)
	}
	body, err := Canonical(raw)
	if err != nil {
		return nil, err
	}
	pub, ok := key.Public().(ed25519.PublicKey)
	if !ok || len(key) != ed25519.PrivateKeySize {
		return nil, fmt.Errorf("%w: receipt: not an Ed25519 key", cells.ErrInvalid)
	}
	sig := ed25519.Sign(key, append([]byte(context), body...))
	return json.Marshal(Entry{Body: body, Key: KeyID(pub), Signature: base64.StdEncoding.EncodeToString(sig)})
}

// signed returns what a signature of the body is over.
func signed(body []byte) ([]byte, error) {
	c, err := Canonical(body)
	return append([]byte(context), c...), err
}

func hash(message []byte) string {
	sum := sha256.Sum256(message)
	return hex.EncodeToString(sum[:])
}

// strict decodes one document without unknown members.
func strict(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.New("more than one document")
	}
	return fmt.Errorf("%w: receipt: %w", cells.ErrInvalid, err)
}

// Statements returns what a receipt says, without verifying any of it.
func (r *Receipt) Statements() ([]Statement, error) {
	out := make([]Statement, len(r.Entries))
	for i, e := range r.Entries {
		if err := strict(e.Body, &out[i]); err != nil {
			return nil, fmt.Errorf("entry %d: %w", i, err)
		}
	}
	return out, nil
}

func (r *Receipt) canonical() ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return Canonical(b)
}

// Begins reports whether the statements of list are the first ones of whole, or all of
// them: whether what was verified as list may have been cut from whole, or be older.
func Begins(list, whole []Statement) bool {
	if len(list) > len(whole) {
		return false
	}
	a, err := json.Marshal(list)
	if err != nil {
		return false
	}
	b, err := json.Marshal(whole[:len(list)])
	return err == nil && bytes.Equal(a, b)
}

// Verify reads a receipt and returns its statements if all of them were signed by one
// of keys, in this order, about this move, and are well formed. Whether they are all that
// there are is for [Ended] to say. The error wraps
// [ErrUnverified], or [cells.ErrInvalid] when doc is no receipt.
func Verify(doc []byte, keys []ed25519.PublicKey) ([]Statement, error) {
	if len(doc) > MaxSize {
		return nil, fmt.Errorf("%w: a receipt has at most %d bytes", cells.ErrInvalid, MaxSize)
	}
	// Members of the same name would be read one way here and another way elsewhere.
	whole, err := Canonical(doc)
	if err != nil {
		return nil, err
	}
	var r Receipt
	if err := strict(doc, &r); err != nil {
		return nil, err
	}
	if again, err := r.canonical(); err != nil || !bytes.Equal(whole, again) {
		return nil, fmt.Errorf("%w: receipt: its members are not written as they are defined", cells.ErrInvalid)
	}
	if r.Format != Format || r.Version != Version {
		return nil, fmt.Errorf("%w: receipt: format %q version %d, want %q version %d", cells.ErrInvalid, r.Format, r.Version, Format, Version)
	}
	if len(r.Entries) == 0 {
		return nil, fmt.Errorf("%w: no entries", ErrUnverified)
	}
	byID := map[string]ed25519.PublicKey{}
	for _, k := range keys {
		byID[KeyID(k)] = k
	}
	out := make([]Statement, len(r.Entries))
	prev := ""
	for i, e := range r.Entries {
		fail := func(format string, args ...any) ([]Statement, error) {
			return nil, fmt.Errorf("%w: entry %d: %s", ErrUnverified, i, fmt.Sprintf(format, args...))
		}
		key, ok := byID[e.Key]
		if !ok {
			return fail("signed by key %s, which is not among those given", e.Key)
		}
		sig, err := base64.StdEncoding.Strict().DecodeString(e.Signature)
		if err != nil {
			return fail("the signature is no base64")
		}
		message, err := signed(e.Body)
		if err != nil {
			return nil, err
		}
		if !ed25519.Verify(key, message, sig) {
			return fail("the signature is not of this statement")
		}
		s := &out[i]
		if err := strict(e.Body, s); err != nil {
			return nil, err
		}
		if err := s.check(); err != nil {
			return nil, err
		}
		switch {
		case s.N != i || s.Prev != prev:
			return fail("it does not follow the one before: statements were removed, or changed places")
		case i > 0 && out[i-1].End != nil:
			return fail("it follows the end of the receipt")
		case s.Move != r.Move || s.Tenant != out[0].Tenant:
			return fail("it is about move %s of tenant %s", s.Move, s.Tenant)
		}
		prev = hash(message)
	}
	return out, nil
}
