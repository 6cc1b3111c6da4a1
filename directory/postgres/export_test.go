// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"io/fs"
	"strconv"
	"testing/fstest"
)

// OpenAs is Open by a build that knows the migrations up to a version only.
func OpenAs(ctx context.Context, url string, o Options, known int64) (*Store, error) {
	return open(ctx, url, o, upTo(known))
}

// upTo are the migrations up to a version.
func upTo(version int64) fs.FS {
	out := fstest.MapFS{}
	list, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		panic(err)
	}
	for _, name := range list {
		base := name[len("migrations/"):]
		n, err := strconv.ParseInt(base[:5], 10, 64)
		if err != nil {
			panic(err)
		}
		if n > version {
			continue
		}
		b, err := fs.ReadFile(migrations, name)
		if err != nil {
			panic(err)
		}
		out[base] = &fstest.MapFile{Data: b}
	}
	return out
}
