// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bufio"
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A snapshot is a text file of lines:
//
//	cloister-routes 1
//	{"revision":7,"fresh_at":"...","routes":2}
//	{...a row...}
//	{...a row...}
//	mac 9f86...
//
// The last line is an HMAC-SHA256 over everything before it. The version is
// outside of what the MAC protects: it is read first, to tell a newer file from a
// damaged one; nothing else is believed before the MAC was checked.
const (
	snapshotMagic   = "cloister-routes "
	snapshotVersion = 1
	snapshotMAC     = "mac "
	snapshotMaxSize = 4 << 30
	// snapshotDebounce is the least time between two writes.
	snapshotDebounce = time.Second
	// snapshotRetry is how long to wait after a write that failed.
	snapshotRetry = 10 * time.Second
)

type snapshotHead struct {
	Revision Revision  `json:"revision"`
	FreshAt  time.Time `json:"fresh_at"`
	Routes   int       `json:"routes"`
}

func snapshotHash(key []byte) hash.Hash {
	return hmac.New(sha256.New, deriveKey(key, labelSnapshot))
}

// writeSnapshot replaces the file at path: written beside it, synced, renamed over
// it, and the folder synced, so that a crash leaves the old file or the new one. each
// gives the rows. Their number stands before them and is known behind them: they go
// through a file of their own, not through memory.
func writeSnapshot(path string, key []byte, head snapshotHead, each func(func(*TenantRoute) bool)) (err error) {
	beside := func() (*os.File, error) {
		return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	}
	rows, err := beside()
	if err != nil {
		return err
	}
	defer func() {
		_ = rows.Close()
		_ = os.Remove(rows.Name())
	}()
	f, err := beside()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if head.Routes, err = encodeRows(rows, each); err != nil {
		return err
	}
	if _, err := rows.Seek(0, io.SeekStart); err != nil {
		return err
	}
	mac := snapshotHash(key)
	w := bufio.NewWriterSize(f, 64<<10)
	if err := encodeSnapshot(io.MultiWriter(w, mac), head, rows); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(w, "%s%x\n", snapshotMAC, mac.Sum(nil)); err != nil {
		return err
	}
	if err := errors.Join(w.Flush(), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// encodeRows writes the rows, and returns how many there were.
func encodeRows(to io.Writer, each func(func(*TenantRoute) bool)) (n int, err error) {
	w := bufio.NewWriterSize(to, 64<<10)
	enc := json.NewEncoder(w)
	each(func(row *TenantRoute) bool {
		n++
		err = enc.Encode(row)
		return err == nil
	})
	return n, errors.Join(err, w.Flush())
}

func encodeSnapshot(w io.Writer, head snapshotHead, rows io.Reader) error {
	if _, err := fmt.Fprintf(w, "%s%d\n", snapshotMagic, snapshotVersion); err != nil {
		return err
	}
	if err := json.NewEncoder(w).Encode(head); err != nil {
		return err
	}
	_, err := io.Copy(w, rows)
	return err
}

// readSnapshot reads and verifies a file. Errors wrap [fs.ErrNotExist] when there
// is none, and [ErrInvalid] when it is not to be trusted; they say why.
func readSnapshot(path string, key []byte) (snapshotHead, []TenantRoute, error) {
	f, err := os.Open(path)
	if err != nil {
		return snapshotHead{}, nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, snapshotMaxSize))
	if err != nil {
		return snapshotHead{}, nil, fmt.Errorf("%w: reading %s: %w", ErrUnavailable, path, err)
	}
	head, rows, err := decodeSnapshot(b, key)
	if err != nil {
		return snapshotHead{}, nil, fmt.Errorf("%w: routes snapshot %s %w", ErrInvalid, path, err)
	}
	return head, rows, nil
}

func decodeSnapshot(b, key []byte) (head snapshotHead, rows []TenantRoute, err error) {
	first, rest, ok := bytes.Cut(b, []byte("\n"))
	number, isOurs := strings.CutPrefix(string(first), snapshotMagic)
	if !isOurs {
		if strings.HasPrefix(snapshotMagic, string(b)) {
			return head, nil, errors.New("is torn: it ends within its first line")
		}
		return head, nil, errors.New("is not a routes snapshot")
	}
	version, err := strconv.Atoi(number)
	switch {
	case err != nil || version < 1:
		return head, nil, fmt.Errorf("has no version but %q", number)
	case version > snapshotVersion:
		return head, nil, fmt.Errorf("is of version %d; this program reads up to %d", version, snapshotVersion)
	case !ok || len(b) == 0 || b[len(b)-1] != '\n':
		return head, nil, errors.New("is torn: its last line is not complete")
	}
	at := bytes.LastIndexByte(b[:len(b)-1], '\n') + 1
	sum, isMAC := bytes.CutPrefix(b[at:len(b)-1], []byte(snapshotMAC))
	if !isMAC {
		return head, nil, errors.New("is torn: it does not end with its signature")
	}
	want := snapshotHash(key)
	want.Write(b[:at])
	got, err := hex.DecodeString(string(sum))
	if err != nil || !hmac.Equal(got, want.Sum(nil)) {
		return head, nil, errors.New("does not carry the signature of this key: it was changed, or another key wrote it")
	}
	dec := json.NewDecoder(bytes.NewReader(rest[:at-len(first)-1]))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&head); err != nil {
		return head, nil, fmt.Errorf("has a bad head: %w", err)
	}
	for {
		var row TenantRoute
		if err := dec.Decode(&row); err == io.EOF {
			break
		} else if err != nil {
			return head, nil, fmt.Errorf("has a bad row after %d: %w", len(rows), err)
		}
		if err := ValidateRoute(row); err != nil {
			return head, nil, fmt.Errorf("has a bad row: %w", err)
		}
		rows = append(rows, row)
	}
	if len(rows) != head.Routes {
		return head, nil, fmt.Errorf("says that it has %d rows and has %d", head.Routes, len(rows))
	}
	return head, rows, nil
}

// loadSnapshot fills the view from the file.
func (r *Router) loadSnapshot() error {
	head, rows, err := readSnapshot(r.cfg.snapshotPath, r.cfg.snapshotKey)
	if err != nil {
		r.status.snapshot(0, err)
		if !errors.Is(err, fs.ErrNotExist) {
			r.cfg.log.Error("cells: the last known good routes were refused", "path", r.cfg.snapshotPath, "err", err)
		}
		return err
	}
	for i := range rows {
		_ = r.observe(rows[i])
	}
	r.view.advance(head.Revision)
	// The age goes on from when the routes were known to be complete. It is by the
	// wall clocks of two moments, and is for people and bounds only.
	r.refreshed(r.born.Add(-max(0, r.born.Round(0).Sub(head.FreshAt))))
	r.loaded.Store(true)
	r.status.fromSnapshot()
	r.status.snapshot(head.Revision, nil)
	return nil
}

func (r *Router) markDirty() {
	if r.cfg.snapshotPath == "" {
		return
	}
	select {
	case r.dirty <- struct{}{}:
	default:
	}
}

// keepSnapshot writes the snapshot after changes, at most once a second and so
// that a large one takes no more than a tenth of the time.
func (r *Router) keepSnapshot() {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-r.life.Done():
		case <-pause.C:
			select {
			case <-r.life.Done():
			case <-r.dirty:
			}
		}
		closing := r.life.Err() != nil
		if closing && len(r.dirty) == 0 && r.view.revision() == r.status.get().SnapshotRevision {
			return
		}
		begun := time.Now()
		err := r.saveSnapshot()
		if closing {
			return
		}
		wait := snapshotDebounce
		if err != nil {
			r.markDirty()
			wait = snapshotRetry
		}
		pause.Reset(max(wait, 10*time.Since(begun)))
	}
}

// foreignSnapshot reads the head of the file if it is not the one that this router
// has written.
func (r *Router) foreignSnapshot() (snapshotHead, error) {
	now, err := os.Stat(r.cfg.snapshotPath)
	if err != nil {
		return snapshotHead{}, err
	}
	if old := r.snapshotFile; old != nil && os.SameFile(old, now) && old.ModTime().Equal(now.ModTime()) && old.Size() == now.Size() {
		return snapshotHead{}, nil
	}
	head, _, err := readSnapshot(r.cfg.snapshotPath, r.cfg.snapshotKey)
	return head, err
}

// saveSnapshot writes what the view holds. A snapshot that another router has
// written to the same file and that is newer stays.
func (r *Router) saveSnapshot() error {
	if r.status.get().Source != SourceTable {
		return nil // nothing newer than the file is known
	}
	// The revision is read first: the rows that are read after it are at least as new.
	head := snapshotHead{Revision: r.view.revision(), FreshAt: time.Now().Add(-r.age()).UTC().Round(0)}
	if have, err := r.foreignSnapshot(); err == nil && have.Revision > head.Revision {
		err = fmt.Errorf("%w: %s is at revision %d, newer than this view at %d; remove it if the table was set back",
			ErrConflict, r.cfg.snapshotPath, have.Revision, head.Revision)
		r.status.snapshot(have.Revision, err)
		return err
	}
	err := writeSnapshot(r.cfg.snapshotPath, r.cfg.snapshotKey, head, r.view.each)
	r.status.snapshot(head.Revision, err)
	r.snapshotFile, _ = os.Stat(r.cfg.snapshotPath)
	if err != nil {
		r.cfg.log.Error("cells: the last known good routes cannot be written", "path", r.cfg.snapshotPath, "err", err)
	}
	return err
}
