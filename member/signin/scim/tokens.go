// SPDX-License-Identifier: Apache-2.0

package scim

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	guard "github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/member/tenancy"
)

// MaxTokens is how many tokens a cell may have: two allow a rotation.
const MaxTokens = 2

// minUnnamed bounds a token that names no cell, in bytes.
const minUnnamed = 16

// Tokens are the SCIM tokens of a process.
type Tokens struct {
	cell           cells.CellID
	named, unnamed []credential.Hash
}

// ReadTokens reads a file with a token a line; empty lines are passed over. No error
// holds a token.
func ReadTokens(path string) (out []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); ; {
		if !sc.Scan() {
			if sc.Err() != nil {
				return nil, fmt.Errorf("%w: %s cannot be read as tokens, one a line", cells.ErrInvalid, path)
			}
			return out, nil
		}
		if l := strings.TrimSpace(sc.Text()); l != "" {
			out = append(out, l)
		}
	}
}

// Problems says what is wrong with the tokens of a cell's settings; cell is "" for a
// deployment that is none. first is the cell's first row, nil while it is not read: then
// only the tokens' form is looked at. No problem holds a token.
func Problems(cell cells.CellID, tokens []string, first *guard.First) (out []string) {
	if cell != "" && len(tokens) > MaxTokens {
		out = append(out, fmt.Sprintf("there are %d SCIM tokens, and %d allow a rotation", len(tokens), MaxTokens))
	}
	if cell != "" && first != nil && first.Cell != cell {
		out = append(out, fmt.Sprintf("the first row is of cell %s", first.Cell))
	}
	for i, t := range tokens {
		named, err := tenancy.SCIMTokenCell(t)
		switch {
		case err != nil:
			out = append(out, fmt.Sprintf("SCIM token %d begins as one that names a cell, and is malformed", i+1))
		case named == "" && (len(t) < minUnnamed || strings.ContainsFunc(t, func(r rune) bool { return r <= ' ' || r > '~' })):
			out = append(out, fmt.Sprintf("SCIM token %d has fewer than %d bytes, or others than visible ASCII", i+1, minUnnamed))
		case cell == "":
		case named != "" && named != cell:
			out = append(out, fmt.Sprintf("SCIM token %d names cell %s, not %s", i+1, named, cell))
		case named == "" && first != nil && !first.First:
			out = append(out, fmt.Sprintf("SCIM token %d names no cell; only the first cell accepts one", i+1))
		}
	}
	return out
}

// NewTokens takes the tokens of a process's settings. What [Problems] finds without the
// first row is an error, which wraps [cells.ErrInvalid]: the process does not boot.
func NewTokens(cell cells.CellID, tokens []string) (*Tokens, error) {
	if bad := Problems(cell, tokens, nil); bad != nil {
		return nil, fmt.Errorf("%w: %s", cells.ErrInvalid, strings.Join(bad, "; "))
	}
	t := &Tokens{cell: cell}
	for _, s := range tokens {
		if named, _ := tenancy.SCIMTokenCell(s); named == "" {
			t.unnamed = append(t.unnamed, credential.Of(s))
		} else {
			t.named = append(t.named, credential.Of(s))
		}
	}
	return t, nil
}

// Authorized reports whether a presented token is one of the cell's. It is the only
// place that compares one. first is the cell's first row as it was read; for a process
// with a cell a nil row is AUTH_UNAVAILABLE: which tokens count is not known yet.
func (t *Tokens) Authorized(presented string, first *guard.First) (bool, error) {
	if t.cell != "" && first == nil {
		return false, unavailable(fmt.Errorf("%w: the cell's first row is not read", cells.ErrUnavailable))
	}
	accepted := t.named
	if t.cell == "" || first.First && first.Cell == t.cell {
		accepted = append(accepted[:len(accepted):len(accepted)], t.unnamed...)
	}
	if named, err := tenancy.SCIMTokenCell(presented); err != nil || t.cell != "" && named != "" && named != t.cell {
		return false, nil
	}
	return credential.Among(presented, accepted), nil
}

func unavailable(err error) *cells.Answer {
	return &cells.Answer{Code: cells.CodeAuthUnavailable, Detail: "the cell's own rows or its store do not answer", RetryAfter: 5 * time.Second, Err: err}
}
