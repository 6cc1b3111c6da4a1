// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"database/sql/driver"
	"fmt"
	"reflect"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// write is one INSERT, UPDATE, DELETE, MERGE or TRUNCATE of a statement.
type write struct {
	verb    string
	schema  string
	table   string // "" when it cannot be read
	alias   string
	replace bool     // INSERT OR REPLACE, REPLACE: deletes rows unseen
	columns []string // INSERT
	rows    [][][]token
	set     []token // UPDATE
	where   []token // UPDATE, DELETE
	hasCond bool
}

// writes finds what a statement writes to. It is enough to tell a mistake; what it
// cannot see (functions, triggers) the database refuses.
func writes(query string) []write {
	toks := lex(query)
	var out []write
	for i, t := range toks {
		if t.is(unreadable) {
			return []write{{verb: "statement with nested comments"}}
		}
		if t.kind != word {
			continue
		}
		next := at(toks, i+1)
		var found bool
		switch t.key {
		case "INSERT":
			found = next.is("INTO", "OR")
		case "REPLACE", "MERGE":
			found = next.is("INTO")
		case "DELETE":
			found = next.is("FROM")
		case "UPDATE":
			found = next.name() || next.is("[")
		case "TRUNCATE":
			found = next.name()
		}
		if !found || !begins(toks, i) {
			continue
		}
		out = append(out, parse(toks, i))
	}
	return out
}

// begins reports whether a statement can begin at i.
func begins(toks []token, i int) bool {
	return i == 0 || toks[i-1].is(";", "(", ")", "ANALYZE", "EXPLAIN", "VERBOSE")
}

func at(toks []token, i int) token {
	if i < 0 || i >= len(toks) {
		return token{kind: other}
	}
	return toks[i]
}

func parse(toks []token, i int) write {
	w := write{verb: toks[i].key}
	toks = within(toks, i)
	i = 1
	for at(toks, i).is("INTO", "FROM", "ONLY", "TABLE", "OR", "ROLLBACK", "ABORT", "FAIL", "IGNORE", "REPLACE") {
		w.replace = w.replace || toks[i].key == "REPLACE"
		i++
	}
	if w.verb == "REPLACE" {
		w.verb, w.replace = "INSERT", true
	}
	if !at(toks, i).name() {
		return w
	}
	w.table = toks[i].text
	for i++; at(toks, i).is(".") && at(toks, i+1).name(); i += 2 {
		w.schema, w.table = w.table, toks[i+1].text
	}
	if at(toks, i).is("AS") {
		i++
	}
	if t := at(toks, i); t.name() && !t.is("SET", "WHERE", "VALUES", "SELECT", "USING", "RETURNING", "DEFAULT", "OVERRIDING", "WITH", "INDEXED", "NOT") {
		w.alias = t.text
		i++
	}
	switch w.verb {
	case "INSERT":
		w.insert(toks[i:])
	case "UPDATE", "DELETE":
		w.condition(toks[i:])
	}
	return w
}

// within returns the statement that begins at i: up to its semicolon, or to the
// parenthesis that it stands in.
func within(toks []token, i int) []token {
	depth := 0
	for j := i; j < len(toks); j++ {
		switch {
		case toks[j].is("("):
			depth++
		case toks[j].is(")"):
			if depth--; depth < 0 {
				return toks[i:j]
			}
		case toks[j].is(";") && depth == 0:
			return toks[i:j]
		}
	}
	return toks[i:]
}

// insert reads the columns and the rows of VALUES.
func (w *write) insert(toks []token) {
	if at(toks, 0).is("(") {
		cols, rest := group(toks)
		for _, c := range list(cols) {
			if len(c) == 1 && c[0].name() {
				w.columns = append(w.columns, c[0].text)
			} else {
				w.columns = append(w.columns, "")
			}
		}
		toks = rest
	}
	if !at(toks, 0).is("VALUES") {
		return
	}
	for toks = toks[1:]; at(toks, 0).is("("); {
		var row []token
		row, toks = group(toks)
		w.rows = append(w.rows, list(row))
		if !at(toks, 0).is(",") {
			return
		}
		toks = toks[1:]
	}
}

// condition reads SET and WHERE.
func (w *write) condition(toks []token) {
	depth, from := 0, -1
	for j, t := range toks {
		switch {
		case t.is("("):
			depth++
		case t.is(")"):
			depth--
		case depth > 0 || t.kind != word:
		case t.is("SET") && from < 0:
			from = j + 1
		case t.is("FROM", "WHERE", "RETURNING", "ORDER", "LIMIT") && w.set == nil && from >= 0:
			w.set = toks[from:j]
		}
		if depth == 0 && t.kind == word && t.is("WHERE") && !w.hasCond {
			w.hasCond, w.where = true, untilTail(toks[j+1:])
		}
	}
	if w.set == nil && from >= 0 {
		w.set = toks[from:]
	}
}

func untilTail(toks []token) []token {
	depth := 0
	for j, t := range toks {
		switch {
		case t.is("("):
			depth++
		case t.is(")"):
			depth--
		case depth == 0 && t.kind == word && t.is("RETURNING", "ORDER", "LIMIT"):
			return toks[:j]
		}
	}
	return toks
}

// group returns what is inside the parenthesis that toks begin with, and the rest.
func group(toks []token) (inside, rest []token) {
	depth := 0
	for j, t := range toks {
		switch {
		case t.is("("):
			depth++
		case t.is(")"):
			if depth--; depth == 0 {
				return toks[1:j], toks[j+1:]
			}
		}
	}
	return toks[1:], nil
}

// list splits at the commas outside of parentheses.
func list(toks []token) [][]token { return split(toks, ",") }

func split(toks []token, key string) [][]token {
	var out [][]token
	depth, from := 0, 0
	for j, t := range toks {
		switch {
		case t.is("("):
			depth++
		case t.is(")"):
			depth--
		case depth == 0 && t.is(key):
			out = append(out, toks[from:j])
			from = j + 1
		}
	}
	return append(out, toks[from:])
}

// check says whether the write may be made under the admission; args are the
// statement's.
func (w *write) check(column string, a guard.Admission, args []any) error {
	c := checker{w: w, column: column, tenant: string(a.Tenant), args: args}
	switch {
	case w.verb == "TRUNCATE":
		return fmt.Errorf("%w: %s holds rows of many tenants and is never truncated", cells.ErrFenced, w.table)
	case a.Tenant == "":
		return fmt.Errorf("%w: %s of %s", guard.ErrNoAdmission, w.verb, w.table)
	case w.verb == "INSERT":
		return c.insert()
	case w.verb == "MERGE":
		return fmt.Errorf("%w: MERGE into %s: use INSERT ... ON CONFLICT", ErrNoTenantCondition, w.table)
	}
	if err := c.assigned(w.set); err != nil {
		return err
	}
	if !w.hasCond {
		return fmt.Errorf("%w: %s of %s has no condition at all; add %s = the admitted tenant", ErrNoTenantCondition, w.verb, w.table, column)
	}
	return c.where(w.where)
}

type checker struct {
	w      *write
	column string
	tenant string
	args   []any
}

func (c *checker) foreign(v string) error {
	return fmt.Errorf("%w: %s of %s for tenant %q under the admission of %q", cells.ErrFenced, c.w.verb, c.w.table, v, c.tenant)
}

func (c *checker) insert() error {
	if c.w.replace {
		return fmt.Errorf("%w: INSERT OR REPLACE into %s deletes rows unseen; use ON CONFLICT ... DO UPDATE", cells.ErrFenced, c.w.table)
	}
	place := -1
	for i, name := range c.w.columns {
		if strings.EqualFold(name, c.column) {
			place = i
		}
	}
	if c.w.columns != nil && place < 0 {
		return fmt.Errorf("%w: INSERT into %s names no value for %s", ErrNoTenantCondition, c.w.table, c.column)
	}
	for _, row := range c.w.rows {
		if c.w.columns == nil {
			// The columns' order is the table's; one of them must be the tenant.
			found := false
			for _, v := range row {
				s, ok := c.value(v)
				found = found || ok && s == c.tenant
			}
			if !found {
				return c.foreign("")
			}
			continue
		}
		if place >= len(row) {
			return fmt.Errorf("%w: INSERT into %s names no value for %s", ErrNoTenantCondition, c.w.table, c.column)
		}
		if s, ok := c.value(row[place]); !ok || s != c.tenant {
			return c.foreign(s)
		}
	}
	return nil // from a SELECT: the database looks at each row
}

// assigned refuses an UPDATE that gives rows to another tenant.
func (c *checker) assigned(set []token) error {
	for _, as := range list(set) {
		if len(as) >= 3 && c.isColumn(as[:1]) && as[1].is("=") {
			if s, ok := c.value(as[2:]); !ok || s != c.tenant {
				return c.foreign(s)
			}
		}
	}
	return nil
}

// where accepts a conjunction of which one part says that the column is the tenant.
func (c *checker) where(cond []token) error {
	good, err := c.conjunction(cond)
	if err != nil || good {
		return err
	}
	return fmt.Errorf("%w: %s of %s; add AND %s = the admitted tenant", ErrNoTenantCondition, c.w.verb, c.w.table, c.column)
}

func (c *checker) conjunction(cond []token) (bool, error) {
	for len(cond) > 0 && cond[0].is("(") {
		inside, rest := group(cond)
		if len(rest) > 0 {
			break
		}
		cond = inside
	}
	if len(split(cond, "OR")) > 1 {
		return false, nil
	}
	parts := split(cond, "AND")
	if len(parts) == 1 {
		return c.comparison(cond)
	}
	good := false
	for _, p := range parts {
		g, err := c.conjunction(p)
		if err != nil {
			return false, err
		}
		good = good || g
	}
	return good, nil
}

// comparison knows column = value, value = column, column IN (values), and the same
// for rows of columns.
func (c *checker) comparison(p []token) (bool, error) {
	left, right, ok := cut(p, "=")
	if ok {
		if good, err := c.equal(left, [][]token{right}); good || err != nil {
			return good, err
		}
		return c.equal(right, [][]token{left})
	}
	left, right, ok = cut(p, "IN")
	if !ok || len(left) == 0 || left[len(left)-1].is("NOT") || !at(right, 0).is("(") {
		return false, nil
	}
	inside, rest := group(right)
	if len(rest) > 0 {
		return false, nil
	}
	return c.equal(left, list(inside))
}

func cut(toks []token, key string) (left, right []token, ok bool) {
	parts := split(toks, key)
	if len(parts) != 2 {
		return nil, nil, false
	}
	return parts[0], parts[1], true
}

// equal reports whether left, a column or a row of columns, pins the tenant's to the
// admitted one in each of the values.
func (c *checker) equal(left []token, values [][]token) (bool, error) {
	place := -1 // in a row of columns
	if !c.isColumn(left) {
		if !at(left, 0).is("(") {
			return false, nil
		}
		inside, rest := group(left)
		for i, col := range list(inside) {
			if c.isColumn(col) {
				place = i
			}
		}
		if place < 0 || len(rest) > 0 {
			return false, nil
		}
	}
	for _, v := range values {
		if place >= 0 {
			if !at(v, 0).is("(") {
				return false, nil
			}
			inside, _ := group(v)
			row := list(inside)
			if place >= len(row) {
				return false, nil
			}
			v = row[place]
		}
		s, ok := c.value(v)
		if !ok {
			return false, nil
		}
		if s != c.tenant {
			return false, c.foreign(s)
		}
	}
	return len(values) > 0, nil
}

// isColumn reports whether toks are the tenant column of the table that is written.
func (c *checker) isColumn(toks []token) bool {
	n := len(toks)
	if n == 0 || n%2 == 0 || !toks[n-1].name() || !strings.EqualFold(toks[n-1].text, c.column) {
		return false
	}
	if n == 1 {
		return true
	}
	return toks[n-2].is(".") && toks[n-3].name() && (strings.EqualFold(toks[n-3].text, c.w.table) || c.w.alias != "" && strings.EqualFold(toks[n-3].text, c.w.alias))
}

// value returns a placeholder's argument or a literal, as text.
func (c *checker) value(toks []token) (string, bool) {
	for len(toks) == 3 && toks[1].is("::") {
		toks = toks[:1]
	}
	for len(toks) > 2 && toks[0].is("(") && toks[len(toks)-1].is(")") {
		toks = toks[1 : len(toks)-1]
	}
	if len(toks) != 1 {
		return "", false
	}
	switch t := toks[0]; t.kind {
	case text:
		return t.text, true
	case param:
		if t.n < 0 || t.n >= len(c.args) {
			return "", false
		}
		return asText(c.args[t.n])
	}
	return "", false
}

func asText(v any) (string, bool) {
	if vr, ok := v.(driver.Valuer); ok {
		if rv := reflect.ValueOf(v); rv.Kind() == reflect.Pointer && rv.IsNil() {
			return "", false
		}
		x, err := vr.Value()
		if err != nil {
			return "", false
		}
		v = x
	}
	rv := reflect.ValueOf(v)
	for rv.Kind() == reflect.Pointer && !rv.IsNil() {
		rv = rv.Elem()
	}
	switch {
	case rv.Kind() == reflect.String:
		return rv.String(), true
	case rv.Kind() == reflect.Slice && rv.Type().Elem().Kind() == reflect.Uint8:
		return string(rv.Bytes()), true
	}
	return "", false
}
