// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/internal/sealed"
)

// format is that of snapshots.
var format = sealed.Format{Name: "cloister-topology", Version: 1, Label: "cloister topology snapshot 1"}

type snapshot struct {
	SeenAt   time.Time     `json:"seen_at"`
	Topology *api.Topology `json:"topology"`
}

// read returns a file's topology. The error wraps fs.ErrNotExist when there is no
// file, and [cells.ErrInvalid] when it is not to be trusted.
func read(path string, key []byte) (snapshot, error) {
	var s snapshot
	err := format.Read(path, key, &s)
	if err == nil && s.Topology == nil {
		err = fmt.Errorf("%s: %w: it holds no topology", path, sealed.ErrUntrusted)
	}
	if errors.Is(err, sealed.ErrUntrusted) {
		return snapshot{}, fmt.Errorf("%w: topology snapshot %w", cells.ErrInvalid, err)
	}
	return s, err
}
