// SPDX-License-Identifier: Apache-2.0

package topology

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
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// A snapshot is three lines: a version, the topology, a MAC over both.
//
//	cloister-topology 1
//	{"seen_at":"...","topology":{...}}
//	mac 9f86...
const (
	magic        = "cloister-topology 1\n"
	magicPrefix  = "cloister-topology "
	macPrefix    = "mac "
	maxSnapshot  = 64 << 20
	keyLabel     = "cloister topology snapshot 1"
	minKeyLength = 16
)

type snapshot struct {
	SeenAt   time.Time     `json:"seen_at"`
	Topology *api.Topology `json:"topology"`
}

func seal(key, body []byte) ([]byte, error) {
	k, err := hkdf.Key(sha256.New, key, nil, keyLabel, 32)
	if err != nil {
		return nil, err
	}
	m := hmac.New(sha256.New, k)
	m.Write(body)
	return fmt.Appendf(nil, "%s%s\n", macPrefix, hex.EncodeToString(m.Sum(nil))), nil
}

// write replaces the file so that a crash leaves the old one or the new one.
func write(path string, key []byte, s snapshot) (err error) {
	body, err := json.Marshal(s)
	if err != nil {
		return err
	}
	body = append(append([]byte(magic), body...), '\n')
	mac, err := seal(key, body)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if _, err := f.Write(append(body, mac...)); err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// read returns a file's topology. The error wraps fs.ErrNotExist when there is no
// file, and [cells.ErrInvalid] when it is not to be trusted.
func read(path string, key []byte) (snapshot, error) {
	f, err := os.Open(path)
	if err != nil {
		return snapshot{}, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSnapshot+1))
	if err != nil {
		return snapshot{}, err
	}
	s, err := decode(b, key)
	if err != nil {
		return snapshot{}, fmt.Errorf("%w: topology snapshot %s %w", cells.ErrInvalid, path, err)
	}
	return s, nil
}

func decode(b, key []byte) (snapshot, error) {
	switch {
	case len(b) > maxSnapshot:
		return snapshot{}, errors.New("is too large")
	case !bytes.HasPrefix(b, []byte(magicPrefix)):
		return snapshot{}, errors.New("is no topology snapshot")
	case !bytes.HasPrefix(b, []byte(magic)):
		return snapshot{}, errors.New("is of another version")
	}
	i := bytes.LastIndexByte(bytes.TrimSuffix(b, []byte("\n")), '\n')
	if i < len(magic) {
		return snapshot{}, errors.New("is torn")
	}
	want, err := seal(key, b[:i+1])
	if err != nil {
		return snapshot{}, err
	}
	if !hmac.Equal(want, b[i+1:]) {
		return snapshot{}, errors.New("is torn, or signed with another key")
	}
	var s snapshot
	if err := json.Unmarshal(b[len(magic):i], &s); err != nil {
		return snapshot{}, err
	}
	if s.Topology == nil {
		return snapshot{}, errors.New("holds no topology")
	}
	return s, nil
}
