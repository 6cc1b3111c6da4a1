// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

// Path is where both places answer.
const Path = "/v1/health/deployment"

// maxAnswer bounds an answer's body.
const maxAnswer = 16 << 10

// ErrRefused: what was reached is not the deployment that was meant. Returned by the
// client and by Want.Check. Never retry unchanged.
var ErrRefused = errors.New("probe: refused")

// Answer is what a probe listener says.
type Answer struct {
	// Deployment is the deployment id.
	Deployment stores.DeploymentID `json:"deployment_id"`
	// Bucket and Prefix say where the deployment keeps its objects; "" without a bucket.
	Bucket string `json:"bucket"`
	Prefix string `json:"prefix"`
	// Stores are the kinds of the deployment's stores, sorted.
	Stores []stores.Kind `json:"stores"`
	// Nonces are the nonces that the stores hold now, by kind; a store without one has no
	// entry.
	Nonces map[stores.Kind]stores.Nonce `json:"nonces"`
}

// Location returns the bucket and prefix.
func (a Answer) Location() stores.Location {
	return stores.Location{Bucket: a.Bucket, Prefix: a.Prefix}
}

// id is what the service's own port says.
type id struct {
	Deployment stores.DeploymentID `json:"deployment_id"`
}

// Want is what a deployment is expected to answer.
type Want struct {
	// Deployment is the id; required.
	Deployment stores.DeploymentID
	// Location is the bucket and prefix, or zero for a cell without a bucket.
	Location stores.Location
	// Nonces are those that have just been written: one for every store of the cell.
	Nonces map[stores.Kind]stores.Nonce
}

// Check returns nil if the answer is the one that is wanted, and [ErrRefused]
// otherwise. The stores are exactly those of the nonces: a registration that leaves a
// store out does not pass for a cell that has it.
func (w Want) Check(a Answer) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
	}
	if err := w.Deployment.Validate(); err != nil {
		return refuse("what is expected is malformed: %v", err)
	}
	if len(w.Nonces) == 0 {
		return refuse("no nonce is expected, so no store would be told from its copy")
	}
	if a.Deployment != w.Deployment {
		return refuse("it is deployment %s, not %s", a.Deployment, w.Deployment)
	}
	if a.Location() != w.Location {
		return refuse("it keeps its objects at %s, not %s", a.Location(), w.Location)
	}
	if want := slices.Sorted(maps.Keys(w.Nonces)); !slices.Equal(want, a.Stores) {
		return refuse("its stores are %v, not %v", a.Stores, want)
	}
	for _, k := range a.Stores {
		if err := w.Nonces[k].Validate(); err != nil {
			return refuse("the nonce expected of %s is malformed: %v", k, err)
		}
		got, ok := a.Nonces[k]
		switch {
		case !ok:
			return refuse("its %s holds no nonce, so it is not the one that the nonce was written to", k)
		case subtle.ConstantTimeCompare([]byte(got), []byte(w.Nonces[k])) != 1:
			return refuse("its %s holds another nonce, so it is not the one that the nonce was written to", k)
		}
	}
	return nil
}

// Validate returns [cells.ErrInvalid] for an answer that no listener gives.
func (a Answer) Validate() error {
	if err := a.Deployment.Validate(); err != nil {
		return err
	}
	if err := a.Location().Validate(); err != nil {
		return err
	}
	if len(a.Stores) == 0 || !slices.IsSorted(a.Stores) || len(slices.Compact(slices.Clone(a.Stores))) != len(a.Stores) {
		return fmt.Errorf("%w: the list of stores is empty, unsorted or names one twice", cells.ErrInvalid)
	}
	for _, k := range a.Stores {
		if err := k.Validate(); err != nil {
			return err
		}
	}
	for k, n := range a.Nonces {
		if !slices.Contains(a.Stores, k) {
			return fmt.Errorf("%w: a nonce of a store that is not listed", cells.ErrInvalid)
		}
		if err := n.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// decode reads one JSON object of at most maxAnswer bytes and nothing after it.
// Members that this version does not know are passed over: a newer build may say
// more.
func decode(r io.Reader, into any) error {
	body, err := io.ReadAll(io.LimitReader(r, maxAnswer+1))
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	if len(body) > maxAnswer {
		return fmt.Errorf("%w: the answer is longer than %d bytes", cells.ErrInvalid, maxAnswer)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: the answer is not the JSON of a probe", cells.ErrInvalid)
	}
	return nil
}

// errBroken: the answer's body ended before it was read.
var errBroken = errors.New("the answer broke off")
