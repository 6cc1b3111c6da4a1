// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// FileTable is a [RoutingTable] in one file that several processes of one machine
// may use at once. It is right for up to some thousands of tenants: every change
// writes the file anew.
//
// A change takes the lock file (path + ".lock", flock), writes path + ".tmp",
// flushes it, renames it over path and flushes the folder; it is acknowledged
// only after that. So a reader, who takes no lock, always finds a whole file: the
// one before or the one after. What can go wrong:
//
//   - the disk is full or a write fails: the change fails with [ErrUnavailable]
//     and the file is as it was;
//   - the process dies: the lock goes with it, the file is one of the two;
//   - the file is torn, altered, empty or of another kind (checked by a SHA-256
//     over its content), or written by a newer version: every call fails with
//     [ErrInvalid], and the file is never overwritten. Restore it from a copy;
//   - the file vanishes or goes back in time: [ErrInvalid] as well, since epochs
//     would restart. The lock file remembers that there was a table, also for
//     processes that start later; remove both files to start with nothing.
//
// The file system must have working flock and atomic rename (not NFS).
type FileTable struct {
	path string
	cfg  tableConfig
	done chan struct{} // closed by Close

	// write admits one writer of this process; its holder owns lock.
	write chan struct{}
	lock  *os.File

	mu      sync.Mutex // guards all below, and reading the file
	cur     *fileState // nil until first read
	changed chan struct{}
	closed  bool

	// create opens the temporary file; tests put failing disks here.
	create func(name string, mode fs.FileMode) (tempFile, error)
}

type tempFile interface {
	io.WriteCloser
	Chmod(fs.FileMode) error
	Sync() error
}

var _ RoutingTable = (*FileTable)(nil)

// NewFileTable returns the table in the file at path. Nothing is read or created
// yet: a missing file is an empty table, and errors surface on use. The folder
// must exist. A symbolic link at path is followed.
func NewFileTable(path string, opts ...TableOption) *FileTable {
	t := &FileTable{
		path: path, cfg: newTableConfig(opts), done: make(chan struct{}),
		write: make(chan struct{}, 1), changed: make(chan struct{}),
		create: func(name string, mode fs.FileMode) (tempFile, error) {
			return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, mode)
		},
	}
	if p, err := filepath.EvalSymlinks(path); err == nil {
		t.path = p
	}
	return t
}

// Close ends every watch and every later call with [ErrClosed] and releases the
// files. It waits for a change that is being written. It may be called again.
func (t *FileTable) Close() error {
	t.write <- struct{}{}
	defer func() { <-t.write }()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	close(t.done)
	if t.cur != nil {
		t.cur.release()
	}
	if t.lock != nil {
		return t.lock.Close()
	}
	return nil
}

// Get implements [RoutingTable].
func (t *FileTable) Get(ctx context.Context, tenant TenantID) (TenantRoute, error) {
	if err := beginRead(ctx, tenant); err != nil {
		return TenantRoute{}, err
	}
	s, _, err := t.load()
	if err != nil {
		return TenantRoute{}, err
	}
	i, found := s.find(tenant)
	if !found {
		return TenantRoute{}, fmt.Errorf("%w for %s", ErrNotFound, tenant)
	}
	return s.rows[i].route.Clone(), nil
}

// List implements [RoutingTable].
func (t *FileTable) List(ctx context.Context, opts ListOptions) (RoutePage, error) {
	if ctx.Err() != nil {
		return RoutePage{}, endOf(ctx)
	}
	if err := opts.Validate(); err != nil {
		return RoutePage{}, err
	}
	s, _, err := t.load()
	if err != nil {
		return RoutePage{}, err
	}
	page := RoutePage{Revision: s.revision}
	i, found := s.find(opts.After)
	if found {
		i++
	}
	for ; i < len(s.rows); i++ {
		r := &s.rows[i].route
		if !opts.Matches(r) {
			continue
		}
		if len(page.Routes) == opts.PageSize() {
			page.Next = page.Routes[len(page.Routes)-1].TenantID
			break
		}
		page.Routes = append(page.Routes, r.Clone())
	}
	return page, nil
}

// Watch implements [RoutingTable]. Every past revision of the table can be
// watched from; [ErrCompacted] means that from is ahead of the file.
func (t *FileTable) Watch(ctx context.Context, from Revision) (RouteWatcher, error) {
	if ctx.Err() != nil {
		return nil, endOf(ctx)
	}
	if _, _, err := t.since(from); err != nil {
		return nil, err
	}
	return &pullWatcher{
		from: from, idle: t.cfg.idle, poll: t.cfg.poll, since: t.since,
		tableDone: t.done, done: make(chan struct{}),
	}, nil
}

func (t *FileTable) since(from Revision) (RouteUpdate, <-chan struct{}, error) {
	s, changed, err := t.load()
	if err != nil {
		return RouteUpdate{}, nil, err
	}
	if from > s.revision {
		return RouteUpdate{}, nil, fmt.Errorf("%w: revision %d is ahead of the table's %d", ErrCompacted, from, s.revision)
	}
	up := RouteUpdate{Revision: s.revision}
	if from == s.revision {
		return up, changed, nil
	}
	for _, row := range s.rows {
		if row.route.Revision > from {
			up.Routes = append(up.Routes, row.route.Clone())
		}
	}
	slices.SortFunc(up.Routes, func(a, b TenantRoute) int { return cmpRevision(a.Revision, b.Revision) })
	return up, changed, nil
}

func cmpRevision(a, b Revision) int {
	if a < b {
		return -1
	}
	if a > b {
		return 1
	}
	return 0
}

// CompareAndSet implements [RoutingTable]. It waits for its turn among the
// threads and processes that write; the context bounds that wait, not the write.
func (t *FileTable) CompareAndSet(ctx context.Context, old Revision, next TenantRoute) (TenantRoute, error) {
	if ctx.Err() != nil {
		return TenantRoute{}, endOf(ctx)
	}
	next = CanonicalRoute(next)
	if err := ValidateRoute(next); err != nil {
		return TenantRoute{}, err
	}
	select {
	case t.write <- struct{}{}:
	case <-ctx.Done():
		return TenantRoute{}, endOf(ctx)
	case <-t.done:
		return TenantRoute{}, ErrClosed
	}
	defer func() { <-t.write }()
	select {
	case <-t.done: // both were ready
		return TenantRoute{}, ErrClosed
	default:
	}
	unlock, err := t.takeLock(ctx)
	if err != nil {
		return TenantRoute{}, err
	}
	defer unlock()
	s, _, err := t.load()
	if err != nil {
		return TenantRoute{}, err
	}
	return t.swap(s, old, next)
}

// swap runs with the lock held; s is what the file holds.
func (t *FileTable) swap(s *fileState, old Revision, next TenantRoute) (TenantRoute, error) {
	i, found := s.find(next.TenantID)
	var cur TenantRoute
	if found {
		cur = s.rows[i].route
	}
	if err := checkSwap(cur, old, next); err != nil {
		return TenantRoute{}, err
	}
	next.Revision = s.revision + 1
	enc, err := EncodeRoute(next)
	if err != nil {
		return TenantRoute{}, err
	}
	row := &fileRow{route: next, enc: enc}
	rows := slices.Clone(s.rows)
	if found {
		rows[i] = row
	} else {
		rows = slices.Insert(rows, i, row)
	}
	n := &fileState{revision: next.Revision, rows: rows}
	if err := t.replace(n, s.mode()); err != nil {
		return TenantRoute{}, err
	}
	// The next reader opens the file that was just written and takes it from here.
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := n.adopt(t.path); err != nil {
		return TenantRoute{}, fmt.Errorf("%w: %s was written but cannot be opened: %w", ErrUnavailable, t.path, err)
	}
	t.install(n)
	return next.Clone(), nil
}

// replace makes n the content of the file, durably.
func (t *FileTable) replace(n *fileState, mode fs.FileMode) error {
	tmp := t.path + ".tmp"
	if err := t.writeTemp(tmp, n.encode(), mode); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("%w: writing %s; %s is unchanged: %w", ErrUnavailable, tmp, t.path, err)
	}
	if err := os.Rename(tmp, t.path); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("%w: replacing %s: %w", ErrUnavailable, t.path, err)
	}
	if err := syncDir(filepath.Dir(t.path)); err != nil {
		return fmt.Errorf("%w: %s was written but its folder could not be flushed: %w", ErrUnavailable, t.path, err)
	}
	if err := t.markLock(); err != nil {
		return fmt.Errorf("%w: %s was written but its lock file was not: %w", ErrUnavailable, t.path, err)
	}
	return nil
}

func (t *FileTable) writeTemp(name string, content []byte, mode fs.FileMode) error {
	f, err := t.create(name, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// load returns the state of the file and a channel that is closed when this
// process changes it.
func (t *FileTable) load() (*fileState, <-chan struct{}, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, nil, ErrClosed
	}
	if t.cur != nil && t.cur.current(t.path) {
		return t.cur, t.changed, nil
	}
	s, err := readFileState(t.path)
	if err != nil {
		return nil, nil, err
	}
	if s.file == nil && (t.cur == nil || t.cur.revision == 0) && t.wasWritten() {
		// A first change by another process may have come between the two looks.
		if s, err = readFileState(t.path); err != nil {
			return nil, nil, err
		}
		if s.file == nil {
			return nil, nil, fmt.Errorf("%w: %s is missing, and %s says that it held routes; restore it, or remove the lock file to start with none",
				ErrInvalid, t.path, t.lockPath())
		}
	}
	if t.cur != nil && s.revision < t.cur.revision {
		s.release()
		return nil, nil, fmt.Errorf("%w: %s went back from revision %d to %d; an older copy was put there or it was removed",
			ErrInvalid, t.path, t.cur.revision, s.revision)
	}
	t.install(s)
	return s, t.changed, nil
}

// install makes s the current state. The caller holds mu.
func (t *FileTable) install(s *fileState) {
	if t.cur != nil {
		t.cur.release()
	}
	moved := t.cur == nil || t.cur.revision != s.revision
	t.cur = s
	if moved {
		close(t.changed)
		t.changed = make(chan struct{})
	}
}

const lockMark = "routes\n"

func (t *FileTable) lockPath() string { return t.path + ".lock" }

// wasWritten reports whether the lock file says that there was a table.
func (t *FileTable) wasWritten() bool {
	fi, err := os.Stat(t.lockPath())
	return err == nil && fi.Size() > 0
}

// markLock records in the lock file that the table has been written.
func (t *FileTable) markLock() error {
	fi, err := t.lock.Stat()
	if err != nil || fi.Size() > 0 {
		return err
	}
	if _, err := t.lock.WriteAt([]byte(lockMark), 0); err != nil {
		return err
	}
	return t.lock.Sync()
}

// takeLock takes the lock among processes. The caller holds write.
func (t *FileTable) takeLock(ctx context.Context) (func(), error) {
	wait := time.Millisecond
	for {
		ok, err := t.tryLock()
		if err != nil {
			return nil, fmt.Errorf("%w: lock file: %w", ErrUnavailable, err)
		}
		if ok {
			return func() { _ = syscall.Flock(int(t.lock.Fd()), syscall.LOCK_UN) }, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("waiting for %s: %w", t.lockPath(), endOf(ctx))
		case <-t.done:
			timer.Stop()
			return nil, ErrClosed
		}
		wait = min(wait*2, 16*time.Millisecond)
	}
}

// tryLock takes the lock if it is free. A lock file that was removed or replaced
// meanwhile does not count: others would lock the new one.
func (t *FileTable) tryLock() (bool, error) {
	if t.lock == nil {
		f, err := os.OpenFile(t.lockPath(), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return false, err
		}
		t.lock = f
	}
	err := syscall.Flock(int(t.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	held, err := t.lock.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Stat(t.lockPath())
	if err == nil && os.SameFile(held, named) {
		return true, nil
	}
	err = t.lock.Close()
	t.lock = nil
	return false, err
}
