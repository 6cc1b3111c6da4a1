// SPDX-License-Identifier: Apache-2.0

package celltable

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"go.yaml.in/yaml/v3"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/rules"
)

// maxTable bounds a file, in bytes.
const maxTable = 4 << 20

// File is a table in a file, as YAML or JSON, for routers without a directory: whoever
// edits the file is the directory. It is read again at each interval, strictly:
// unknown fields and an empty file are errors, which leave the last table in use.
//
//	aliases: [www.example.com]
//	cells:
//	  - {name: a, host: app.example.com, first: true, state: serving, upstream: "http://a.internal:8080", issuers: [memory]}
//	  - {name: b, host: b.example.com, state: serving, upstream: "http://b.internal:8080", issuers: ["https://b.example.com"]}
type File string

// Table implements [Source].
func (f File) Table(context.Context) (rules.Table, error) {
	r, err := os.Open(string(f))
	if err != nil {
		return rules.Table{}, fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxTable+1))
	if err != nil {
		return rules.Table{}, fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	if len(b) > maxTable {
		return rules.Table{}, fmt.Errorf("%w: %s has more than %d bytes", cells.ErrInvalid, f, maxTable)
	}
	var t rules.Table
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	if err := dec.Decode(&t); err != nil {
		return rules.Table{}, fmt.Errorf("%w: %s: %w", cells.ErrInvalid, f, err)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return rules.Table{}, fmt.Errorf("%w: %s has more than one document", cells.ErrInvalid, f)
	}
	return t, nil
}
