// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/vitals"
)

// MaxVitalsBody is the largest body of a VitalsReport, in bytes.
const MaxVitalsBody = 4 << 20

// VitalsReport is the body of POST PathVitals: how the requests of one edge process
// went, all of them since its start.
type VitalsReport struct {
	// Instance names the process; 1 to 64 bytes of [A-Za-z0-9._-]. Seq grows with each
	// of its reports: one that is overtaken is ignored.
	Instance string       `json:"instance"`
	Seq      int64        `json:"seq"`
	Rows     []vitals.Row `json:"rows"`
}

// Normalize reports what is malformed; the error wraps [cells.ErrInvalid].
func (r *VitalsReport) Normalize() error {
	if cells.MoveID(r.Instance).Validate() != nil {
		return fmt.Errorf("%w: instance must have 1 to 64 bytes of [A-Za-z0-9._-]", cells.ErrInvalid)
	}
	if len(r.Rows) > vitals.MaxRows || r.Seq < 1 {
		return fmt.Errorf("%w: %d rows, seq %d; at most %d rows", cells.ErrInvalid, len(r.Rows), r.Seq, vitals.MaxRows)
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		if err := row.Cell.Validate(); err != nil {
			return err
		}
		if err := checkText("version", row.Version, MaxText); err != nil {
			return err
		}
		if err := row.Validate(); err != nil {
			return err
		}
	}
	return nil
}
