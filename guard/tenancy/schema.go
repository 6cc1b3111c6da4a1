// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"fmt"
	"strconv"
)

// NewestSchema is the newest version of the cell's own rows, heartbeats and
// configuration fingerprints that these sources know:
//
//	1  the rows, and the fields without a version beside them
//	2  fingerprints have "audiences"; heartbeats say how long a process uses what it read
//	3  heartbeats have the process's run-time settings
//
// A version only adds. What an older build does not know has a default, which says the
// same as its absence, and older builds run on rows that a newer one has installed.
const NewestSchema = 3

// schema is the version that this build has, as text so that the linker can set it. The
// one other use is a build of an older version from the same sources, with which the
// two are tried side by side:
//
//	go build -ldflags '-X github.com/cloister-dev/cloister/guard/tenancy.schema=1'
//
// Such a build installs that version's tables, writes and reads its columns, and knows
// its fields alone.
var schema = "3"

var built = parseSchema(schema)

// SchemaVersion is the version that this build has: [NewestSchema], unless it was built
// as an older one. A fingerprint carries it as information; [Fingerprint.Matches]
// compares fields.
func SchemaVersion() int { return built }

// parseSchema ends a program that was built for a version that there is not.
func parseSchema(s string) int {
	v, err := strconv.Atoi(s)
	if err != nil || v < 1 || v > NewestSchema {
		panic(fmt.Sprintf("tenancy: built for schema %q; there are 1 to %d", s, NewestSchema))
	}
	return v
}

// since has the fields that came after version 1.
var since = map[Field]int{FieldAudiences: 2}

// knows reports whether a build of the version has the field.
func knows(version int, f Field) bool { return since[f] <= version }
