// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cloister-dev/cloister/directory/provision/process"
	"github.com/cloister-dev/cloister/internal/files"
)

// Layout names the files of a fleet's state folder.
type Layout struct{ Dir string }

// The files and folders.
func (l Layout) PKI() string                 { return filepath.Join(l.Dir, "pki") }
func (l Layout) Certs(name string) string    { return filepath.Join(l.Dir, "certs", name) }
func (l Layout) Logs() string                { return filepath.Join(l.Dir, "logs") }
func (l Layout) Directory() string           { return filepath.Join(l.Dir, "directory") }
func (l Layout) Edge() string                { return filepath.Join(l.Dir, "edge") }
func (l Layout) Cell(name string) string     { return filepath.Join(l.Dir, "cells", name) }
func (l Layout) Postgres(cell string) string { return filepath.Join(l.Dir, "postgres", cell) }
func (l Layout) PassFile(cell string) string { return filepath.Join(l.Cell(cell), "pgpass") }
func (l Layout) Credential() string          { return filepath.Join(l.Dir, "operator.credential") }
func (l Layout) AdmissionKey() string        { return filepath.Join(l.Dir, "admission.key") }
func (l Layout) CellKey(cell string) string  { return filepath.Join(l.Cell(cell), "admission.key") }
func (l Layout) Secret(name, key string) string {
	return filepath.Join(l.Dir, "secrets", name, key)
}
func (l Layout) Retired(cell string, generation int64) string {
	return filepath.Join(l.Dir, "retired", fmt.Sprintf("%s-g%d", cell, generation))
}
func (l Layout) Info() string   { return filepath.Join(l.Dir, "fleet.json") }
func (l Layout) engine() string { return filepath.Join(l.Dir, "store") }
func (l Layout) lock() string   { return filepath.Join(l.Dir, "lock") }

// Info is what cell dev writes for the other commands: where its listeners are.
type Info struct {
	Name string `json:"name"`
	PID  int    `json:"pid"`
	// Edge is the public URL, EdgeAdmin the admin listener's, Operator the
	// directory's operator listener, Channel its channel listener.
	Edge      string   `json:"edge"`
	EdgeAdmin string   `json:"edge_admin"`
	Operator  string   `json:"operator"`
	Channel   string   `json:"channel"`
	Store     string   `json:"store"`
	Cells     []string `json:"cells"`
}

// ErrNoFleet says that no fleet keeps its state in the folder.
var ErrNoFleet = errors.New("no fleet here; start one with: cell dev")

// ErrStopped says that the folder's fleet does not run.
var ErrStopped = errors.New("the fleet is stopped")

// ReadInfo reads what cell dev wrote. [ErrNoFleet] when there is none, [ErrStopped]
// when it has ended since.
func ReadInfo(dir string) (Info, error) {
	b, err := os.ReadFile(Layout{dir}.Info())
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(Layout{dir}.lock()); err == nil {
			return Info{}, fmt.Errorf("%w; start it with: cell dev --fleet %s", ErrStopped, dir)
		}
		return Info{}, fmt.Errorf("%s: %w", dir, ErrNoFleet)
	}
	if err != nil {
		return Info{}, err
	}
	var i Info
	if err := json.Unmarshal(b, &i); err != nil {
		return Info{}, fmt.Errorf("%s is damaged (%w); start the fleet again", Layout{dir}.Info(), err)
	}
	if i.PID > 0 && errors.Is(syscall.Kill(i.PID, 0), syscall.ESRCH) {
		return Info{}, fmt.Errorf("%w; start it with: cell dev --fleet %s", ErrStopped, dir)
	}
	return i, nil
}

// take locks the state folder for this process; the lock goes with it.
func (l Layout) take() (release func(), err error) {
	if err := os.MkdirAll(l.Dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(l.lock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another fleet runs in %s; stop it, or choose another folder with --fleet", l.Dir)
	}
	return func() { f.Close() }, nil
}

// protect makes the folders of the fleet, which nobody but this user can look into.
func (l Layout) protect() error {
	for _, d := range []string{l.PKI(), filepath.Dir(l.Certs("x")), l.Logs(), l.Directory(), l.Edge(), filepath.Dir(l.Cell("x"))} {
		if err := files.Folder(d, 0o700); err != nil {
			return err
		}
	}
	return nil
}

// walkable lets the user whose Postgres servers run below Postgres, when root starts
// them, get there: the way can be walked, and nothing on it be listed or read.
func (l Layout) walkable() error {
	if os.Geteuid() != 0 {
		return nil
	}
	st, err := os.Stat(l.Dir)
	if err != nil {
		return err
	}
	if err := os.Chmod(l.Dir, st.Mode().Perm()|0o011); err != nil {
		return err
	}
	return files.Folder(filepath.Dir(l.Postgres("x")), 0o711)
}

// secret returns the content of a file, made the first time.
func secret(path string, fresh func() string) (string, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		return string(b), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	s := fresh()
	return s, files.Write(path, []byte(s), 0o600)
}

// newKey makes an admission key as [ReadKey] reads it.
func newKey() string {
	raw := make([]byte, 32)
	_, _ = rand.Read(raw)
	return hex.EncodeToString(raw)
}

// ReadKey reads a key of at least 16 bytes, written in hexadecimal.
func ReadKey(path string) ([]byte, error) { return process.ReadKey(path) }
