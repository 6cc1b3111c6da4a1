// SPDX-License-Identifier: Apache-2.0

//go:build unix

package sqlite

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// fileLock is a lock between processes that ends with the one that holds it.
type fileLock struct{ f *os.File }

// lockTenant waits for the right to import the tenant into the database at path.
// The file beside it exists only while somebody holds or wants the lock.
func lockTenant(ctx context.Context, path string, tenant cells.TenantID) (*fileLock, error) {
	sum := sha256.Sum256([]byte(tenant))
	name := path + ".import-" + hex.EncodeToString(sum[:6])
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil && sameFile(f, name) {
			return &fileLock{f}, nil
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, err
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// sameFile reports whether name is still the file that was locked.
func sameFile(f *os.File, name string) bool {
	a, err1 := f.Stat()
	b, err2 := os.Stat(name)
	return err1 == nil && err2 == nil && os.SameFile(a, b)
}

func (l *fileLock) unlock() {
	if l != nil {
		_ = os.Remove(l.f.Name())
		_ = l.f.Close()
	}
}
