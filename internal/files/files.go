// SPDX-License-Identifier: Apache-2.0

// Package files writes files and folders so that nobody sees half of one, or what is
// not theirs. It has no state; a call that fails leaves what was there, and at most a
// file .tmp-* beside it when the machine dies.
package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Write replaces a file at once: a reader sees the old content or the new. Folders on
// the way are made for this user only.
func Write(path string, data []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// Folder makes a folder with the mode, or gives it to the one that is there.
func Folder(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}
