// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

const (
	fileFormat  = "cloister-routes"
	fileVersion = 1
	maxFile     = 1 << 30
)

// fileState is the content of a table file, and the open file that it came from.
// Content is never changed in place. The open descriptor keeps the inode from
// being reused, so that comparing inodes tells whether the file is still this one.
type fileState struct {
	revision Revision
	rows     []*fileRow // in tenant order
	file     *os.File   // nil: there is no file
	info     fs.FileInfo
}

type fileRow struct {
	route TenantRoute
	enc   []byte
}

func (s *fileState) find(t TenantID) (int, bool) {
	return slices.BinarySearchFunc(s.rows, t, func(r *fileRow, t TenantID) int {
		return strings.Compare(string(r.route.TenantID), string(t))
	})
}

func (s *fileState) release() {
	if s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
}

func (s *fileState) mode() fs.FileMode {
	if s.info == nil {
		return 0o600
	}
	return s.info.Mode().Perm()
}

// current reports whether path still holds what s was read from.
func (s *fileState) current(path string) bool {
	if s.file == nil {
		return false
	}
	fi, err := os.Stat(path)
	return err == nil && os.SameFile(fi, s.info) && fi.Size() == s.info.Size() && fi.ModTime().Equal(s.info.ModTime())
}

// adopt ties s, which was just written to path under the lock, to the file there.
func (s *fileState) adopt(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	fi, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	s.file, s.info = f, fi
	return nil
}

type fileEnvelope struct {
	Format   string          `json:"format"`
	Version  int             `json:"version"`
	Checksum string          `json:"checksum"`
	Body     json.RawMessage `json:"body"`
}

type fileBody struct {
	Revision Revision          `json:"revision"`
	Routes   []json.RawMessage `json:"routes"`
}

func checksum(body []byte) string {
	sum := sha256.Sum256(body)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// encode returns the content of the file: a JSON document with one row a line.
func (s *fileState) encode() []byte {
	n := 64
	for _, r := range s.rows {
		n += len(r.enc) + 2
	}
	body := make([]byte, 0, n)
	body = append(body, `{"revision":`...)
	body = strconv.AppendUint(body, uint64(s.revision), 10)
	body = append(body, `,"routes":[`...)
	for i, r := range s.rows {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(append(body, '\n'), r.enc...)
	}
	body = append(body, "\n]}"...)
	head := fmt.Sprintf("{\"format\":%q,\"version\":%d,\"checksum\":%q,\"body\":\n", fileFormat, fileVersion, checksum(body))
	return slices.Concat([]byte(head), body, []byte("\n}\n"))
}

// readFileState reads the file at path; a missing one is an empty table.
func readFileState(path string) (*fileState, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &fileState{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	s, err := readOpened(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return s, nil
}

func readOpened(f *os.File) (*fileState, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxFile {
		return nil, fmt.Errorf("%w: not a regular file of at most %d bytes", ErrInvalid, maxFile)
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	s, err := decodeFile(b)
	if err != nil {
		return nil, err
	}
	s.file, s.info = f, fi
	return s, nil
}

// decodeFile parses and checks the content of a table file. Every error wraps
// ErrInvalid.
func decodeFile(b []byte) (*fileState, error) {
	var env fileEnvelope
	if err := json.Unmarshal(b, &env); err != nil {
		return nil, fmt.Errorf("%w: torn or not a routes file (%d bytes): %w", ErrInvalid, len(b), err)
	}
	if env.Format != fileFormat {
		return nil, fmt.Errorf("%w: format %q, want %q", ErrInvalid, env.Format, fileFormat)
	}
	if env.Version > fileVersion {
		return nil, fmt.Errorf("%w: written by a newer version (format %d, this one reads up to %d); upgrade this program", ErrInvalid, env.Version, fileVersion)
	}
	if env.Version != fileVersion {
		return nil, fmt.Errorf("%w: format version %d is unknown", ErrInvalid, env.Version)
	}
	if sum := checksum(env.Body); env.Checksum != sum {
		return nil, fmt.Errorf("%w: the checksum is %s, the content has %s: torn or edited", ErrInvalid, env.Checksum, sum)
	}
	dec := json.NewDecoder(bytes.NewReader(env.Body))
	dec.DisallowUnknownFields()
	var body fileBody
	if err := dec.Decode(&body); err != nil {
		return nil, fmt.Errorf("%w: body: %w", ErrInvalid, err)
	}
	s := &fileState{revision: body.Revision, rows: make([]*fileRow, 0, len(body.Routes))}
	for i, raw := range body.Routes {
		r, err := DecodeRoute(raw)
		if err != nil {
			return nil, fmt.Errorf("row %d: %w", i, err)
		}
		if i > 0 && r.TenantID <= s.rows[i-1].route.TenantID {
			return nil, fmt.Errorf("%w: row %d (%s) is out of order", ErrInvalid, i, r.TenantID)
		}
		if r.Revision == 0 || r.Revision > s.revision {
			return nil, fmt.Errorf("%w: row of %s has revision %d, the table %d", ErrInvalid, r.TenantID, r.Revision, s.revision)
		}
		s.rows = append(s.rows, &fileRow{route: r, enc: raw})
	}
	return s, nil
}
