// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// keysEvery is how often it is looked whether a key set's file has changed.
const keysEvery = 2 * time.Second

// keyFile is a key set that follows its file.
type keyFile struct {
	path    string
	log     *slog.Logger
	keys    atomic.Pointer[jose.JSONWebKeySet]
	checked atomic.Int64 // when it was last looked, in Unix nanoseconds

	mu   sync.Mutex // guards what follows
	seen os.FileInfo
	told string // the failure that was logged last
}

func newKeyFile(path string, log *slog.Logger) (*keyFile, error) {
	k := &keyFile{path: path, log: log}
	// Looked at before it is read: what changes in between is read again.
	seen, _ := os.Stat(path)
	keys, err := readKeys(path)
	if err != nil {
		return nil, err
	}
	k.seen = seen
	k.keys.Store(keys)
	k.checked.Store(time.Now().UnixNano())
	return k, nil
}

// get returns the keys. One of the callers reads the file when it has changed.
func (k *keyFile) get(now time.Time) *jose.JSONWebKeySet {
	last := k.checked.Load()
	if now.UnixNano()-last >= int64(keysEvery) && k.checked.CompareAndSwap(last, now.UnixNano()) {
		k.reload()
	}
	return k.keys.Load()
}

func (k *keyFile) reload() {
	k.mu.Lock()
	defer k.mu.Unlock()
	seen, err := os.Stat(k.path)
	if err == nil && k.seen != nil && os.SameFile(seen, k.seen) && seen.ModTime().Equal(k.seen.ModTime()) && seen.Size() == k.seen.Size() {
		return
	}
	var keys *jose.JSONWebKeySet
	if err == nil {
		keys, err = readKeys(k.path)
	}
	if err != nil {
		// It is tried again: the file may be half written.
		if k.told != err.Error() {
			k.told = err.Error()
			k.log.Error("extract: a key set cannot be read again; the last one stays in use", "path", k.path, "err", err)
		}
		return
	}
	k.seen, k.told = seen, ""
	k.keys.Store(keys)
	k.log.Info("extract: a key set was read again", "path", k.path, "keys", len(keys.Keys))
}
