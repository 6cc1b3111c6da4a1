// SPDX-License-Identifier: Apache-2.0

package sealed

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// MinKey is the least length of a key, in bytes.
const MinKey = 16

// maxFile bounds what is read.
const maxFile = 64 << 20

const macPrefix = "mac "

// ErrUntrusted says that a file is not one that was written with the key. Errors of
// [Format.Decode] wrap it.
var ErrUntrusted = errors.New("cannot be trusted")

// Format is one kind of file.
type Format struct {
	// Name, without spaces, and Version are the first line.
	Name    string
	Version int
	// Label parts the keys of formats that are given the same key.
	Label string
}

func (f Format) magic() string { return fmt.Sprintf("%s %d\n", f.Name, f.Version) }

// Seal returns the line that signs body, which begins with the format's first line.
func (f Format) seal(key, body []byte) ([]byte, error) {
	if len(key) < MinKey {
		return nil, fmt.Errorf("sealed: the key has %d bytes, want at least %d", len(key), MinKey)
	}
	k, err := hkdf.Key(sha256.New, key, nil, f.Label, 32)
	if err != nil {
		return nil, err
	}
	m := hmac.New(sha256.New, k)
	m.Write(body)
	return fmt.Appendf(nil, "%s%s\n", macPrefix, hex.EncodeToString(m.Sum(nil))), nil
}

// Encode returns the document as JSON in its sealed form.
func (f Format) Encode(key []byte, doc any) ([]byte, error) {
	b, err := json.Marshal(doc)
	if err != nil {
		return nil, err
	}
	body := append(append([]byte(f.magic()), b...), '\n')
	mac, err := f.seal(key, body)
	if err != nil {
		return nil, err
	}
	return append(body, mac...), nil
}

// Decode checks a sealed form and reads its document into doc.
func (f Format) Decode(b, key []byte, doc any) error {
	magic := f.magic()
	switch {
	case len(b) > maxFile:
		return fmt.Errorf("%w: it is too large", ErrUntrusted)
	case !bytes.HasPrefix(b, []byte(f.Name+" ")):
		return fmt.Errorf("%w: it is no %s file", ErrUntrusted, f.Name)
	case !bytes.HasPrefix(b, []byte(magic)):
		return fmt.Errorf("%w: it is of another version", ErrUntrusted)
	}
	i := bytes.LastIndexByte(bytes.TrimSuffix(b, []byte("\n")), '\n')
	if i < len(magic) {
		return fmt.Errorf("%w: it is torn", ErrUntrusted)
	}
	want, err := f.seal(key, b[:i+1])
	if err != nil {
		return err
	}
	if !hmac.Equal(want, b[i+1:]) {
		return fmt.Errorf("%w: it is torn, or signed with another key", ErrUntrusted)
	}
	if err := json.Unmarshal(b[len(magic):i], doc); err != nil {
		return fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	return nil
}

// Write replaces the file at path.
func (f Format) Write(path string, key []byte, doc any) (err error) {
	b, err := f.Encode(key, doc)
	if err != nil {
		return err
	}
	t, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = t.Close()
			_ = os.Remove(t.Name())
		}
	}()
	if _, err := t.Write(b); err != nil {
		return err
	}
	if err := errors.Join(t.Sync(), t.Close()); err != nil {
		return err
	}
	if err := os.Rename(t.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Read reads the file at path into doc. The error wraps fs.ErrNotExist when there is
// no file, and [ErrUntrusted] when it is not to be used.
func (f Format) Read(path string, key []byte, doc any) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return err
	}
	if err := f.Decode(b, key, doc); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
