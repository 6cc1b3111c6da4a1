// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	budgetFormat  = "cloister-budget"
	budgetVersion = 1
	budgetMark    = "cloister-budget: entries were written\n"
)

// budgetFile is a BudgetStore in one file. A change takes an exclusive lock on
// path + ".lock", writes path + ".tmp", syncs it and renames it over path; a
// reader sees the old content or the new one. The content carries a checksum:
// a torn or edited file is refused, and so is a missing one when the lock file
// says that there was one, because a budget that is forgotten is spent twice.
type budgetFile struct{ path string }

func newBudgetFile(path string) *budgetFile {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		path = p
	}
	return &budgetFile{path: path}
}

func (b *budgetFile) Entries(ctx context.Context, tenant TenantID) ([]BudgetEntry, error) {
	lock, err := b.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	all, err := b.read(lock)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(e BudgetEntry) bool { return e.Tenant != tenant }), nil
}

func (b *budgetFile) Update(ctx context.Context, tenant TenantID, change func([]BudgetEntry) ([]BudgetEntry, error)) error {
	lock, err := b.lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	all, err := b.read(lock)
	if err != nil {
		return err
	}
	var mine, rest []BudgetEntry
	for _, e := range all {
		if e.Tenant == tenant {
			mine = append(mine, e)
		} else {
			rest = append(rest, e)
		}
	}
	changed, err := change(slices.Clone(mine))
	if err != nil {
		return err
	}
	if slices.Equal(changed, mine) {
		return nil
	}
	if err := b.write(lock, append(rest, changed...)); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnavailable, b.path, err)
	}
	return nil
}

// lock returns the locked lock file; closing it unlocks.
func (b *budgetFile) lock(ctx context.Context) (*os.File, error) {
	name := b.path + ".lock"
	wait := time.Millisecond
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			// A lock file that was replaced meanwhile is not the one that others lock.
			held, herr := f.Stat()
			named, nerr := os.Stat(name)
			if herr == nil && nerr == nil && os.SameFile(held, named) {
				return f, nil
			}
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, fmt.Errorf("%w: %s: %w", ErrUnavailable, name, err)
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("waiting for %s: %w", name, endOf(ctx))
		}
		wait = min(wait*2, 16*time.Millisecond)
	}
}

type budgetEnvelope struct {
	Format   string          `json:"format"`
	Version  int             `json:"version"`
	Checksum string          `json:"checksum"`
	Body     json.RawMessage `json:"body"`
}

func (b *budgetFile) read(lock *os.File) ([]BudgetEntry, error) {
	content, err := os.ReadFile(b.path)
	if errors.Is(err, fs.ErrNotExist) {
		if fi, serr := lock.Stat(); serr == nil && fi.Size() > 0 {
			return nil, fmt.Errorf("%w: %s is missing, and its lock file says that it held entries; restore it, or remove the lock file to forget them",
				ErrInvalid, b.path)
		}
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	es, err := decodeBudgets(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.path, err)
	}
	return es, nil
}

func (b *budgetFile) write(lock *os.File, es []BudgetEntry) error {
	content, err := encodeBudgets(es)
	if err != nil {
		return err
	}
	tmp := b.path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, b.path); err != nil {
		return err
	}
	if err := syncDir(filepath.Dir(b.path)); err != nil {
		return err
	}
	if fi, err := lock.Stat(); err != nil || fi.Size() > 0 {
		return err
	}
	_, err = lock.WriteAt([]byte(budgetMark), 0)
	return errors.Join(err, lock.Sync())
}

func encodeBudgets(es []BudgetEntry) ([]byte, error) {
	slices.SortFunc(es, func(x, y BudgetEntry) int {
		if c := strings.Compare(string(x.Tenant), string(y.Tenant)); c != 0 {
			return c
		}
		if c := x.At.Compare(y.At); c != 0 {
			return c
		}
		return strings.Compare(string(x.Move), string(y.Move))
	})
	var body bytes.Buffer
	body.WriteByte('[')
	for i, e := range es {
		line, err := json.Marshal(e)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			body.WriteByte(',')
		}
		body.WriteByte('\n')
		body.Write(line)
	}
	body.WriteString("\n]")
	var out bytes.Buffer
	fmt.Fprintf(&out, "{\"format\":%q,\"version\":%d,\"checksum\":%q,\"body\":\n", budgetFormat, budgetVersion, checksum(body.Bytes()))
	out.Write(body.Bytes())
	out.WriteString("\n}\n")
	return out.Bytes(), nil
}

func decodeBudgets(content []byte) ([]BudgetEntry, error) {
	var env budgetEnvelope
	if err := json.Unmarshal(content, &env); err != nil {
		return nil, fmt.Errorf("%w: torn or not a budget file (%d bytes): %w", ErrInvalid, len(content), err)
	}
	if env.Format != budgetFormat {
		return nil, fmt.Errorf("%w: format %q, want %q", ErrInvalid, env.Format, budgetFormat)
	}
	if env.Version != budgetVersion {
		return nil, fmt.Errorf("%w: format version %d, this program reads %d; upgrade it if the file is newer", ErrInvalid, env.Version, budgetVersion)
	}
	if sum := checksum(env.Body); sum != env.Checksum {
		return nil, fmt.Errorf("%w: the checksum is %s, the content has %s: torn or edited", ErrInvalid, env.Checksum, sum)
	}
	dec := json.NewDecoder(bytes.NewReader(env.Body))
	dec.DisallowUnknownFields()
	var es []BudgetEntry
	if err := dec.Decode(&es); err != nil {
		return nil, fmt.Errorf("%w: body: %w", ErrInvalid, err)
	}
	for _, e := range es {
		if err := errors.Join(e.Tenant.Validate(), e.Move.Validate()); err != nil {
			return nil, err
		}
		if e.Pause < 0 {
			return nil, fmt.Errorf("%w: a pause of %v", ErrInvalid, e.Pause)
		}
	}
	return es, nil
}
