// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cloister-dev/cloister/cells"
)

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return createFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}

func readKey(path string) (*ecdsa.PrivateKey, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("pki: key: %w", err)
	}
	blk, _ := pem.Decode(b)
	if blk == nil || blk.Type != "PRIVATE KEY" {
		return nil, fmt.Errorf("%w: pki: %s holds no PKCS #8 key in PEM", cells.ErrInvalid, path)
	}
	k, err := x509.ParsePKCS8PrivateKey(blk.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: pki: %s: the key cannot be parsed", cells.ErrInvalid, path)
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%w: pki: %s holds a %T, want an ECDSA key", cells.ErrInvalid, path, k)
	}
	return key, nil
}

// createFile writes a new file durably; [ErrExists] when there is one.
func createFile(path string, b []byte, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%w: %s", ErrExists, path)
	}
	if err != nil {
		return err
	}
	if err := writeSync(f, b); err != nil {
		os.Remove(path) // it is ours and incomplete
		return err
	}
	return syncDir(filepath.Dir(path))
}

// replaceFile replaces a file atomically and durably.
func replaceFile(path string, b []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already when all went well
	if err := f.Chmod(mode); err != nil {
		f.Close()
		return err
	}
	if err := writeSync(f, b); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// appendLine adds one line durably. A line that a crash cut off is dropped first.
// The caller holds the folder's lock.
func appendLine(path string, line []byte, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, mode)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(f)
	if whole := bytes.LastIndexByte(b, '\n') + 1; err == nil && whole != len(b) {
		err = f.Truncate(int64(whole))
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	if err := writeSync(f, append(line, '\n')); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// lock keeps other processes, and other goroutines, from changing the folder's
// records. It ends with the process.
func (a *Authority) lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(a.dir, ".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { f.Close() }, nil
}

// writeSync writes, syncs and closes.
func writeSync(f *os.File, b []byte) error {
	_, err := f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
