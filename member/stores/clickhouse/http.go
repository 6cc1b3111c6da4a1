// SPDX-License-Identifier: Apache-2.0

package clickhouse

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

// maxResult bounds what is read of a result.
const maxResult = 64 << 20

// client speaks ClickHouse's HTTP interface.
type client struct {
	http     *http.Client
	url      string // http://host:port/
	database string
	user     string
	password string
}

// query runs a statement and returns the rows of its result; none for a statement
// without. Statements are put together from constants, quoted names and values that
// have been checked: old servers have no parameters.
func (c *client) query(ctx context.Context, statement string) ([][]any, error) {
	// A result is sent once it is whole, so that a statement that fails half way has
	// the status of a failure.
	at := c.url + "?" + url.Values{"database": {c.database}, "wait_end_of_query": {"1"}, "default_format": {"JSONCompact"}}.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, at, strings.NewReader(statement))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	if c.user != "" {
		req.Header.Set("X-ClickHouse-User", c.user)
		req.Header.Set("X-ClickHouse-Key", c.password)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, c.gone(ctx, err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 1<<10))
		return nil, failure(res.StatusCode, res.Header.Get("X-ClickHouse-Exception-Code"), string(text))
	}
	body, err := io.ReadAll(io.LimitReader(res.Body, maxResult+1))
	if err != nil {
		return nil, c.gone(ctx, err)
	}
	if len(body) == 0 {
		return nil, nil
	}
	if len(body) > maxResult {
		return nil, fmt.Errorf("%w: the result is longer than %d bytes", cells.ErrInvalid, maxResult)
	}
	var out struct {
		Data [][]any `json:"data"`
	}
	if err := json.Unmarshal(body, &out); err != nil {
		return nil, fmt.Errorf("%w: what answers is no ClickHouse server: %w", cells.ErrInvalid, err)
	}
	return out.Data, nil
}

func (c *client) gone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
}

// column returns the only value of each row, as text.
func column(rows [][]any) ([]string, error) {
	var out []string
	for _, r := range rows {
		s, ok := "", len(r) == 1
		if ok {
			s, ok = r[0].(string)
		}
		if !ok {
			return nil, fmt.Errorf("%w: a result of another shape", cells.ErrInvalid)
		}
		out = append(out, s)
	}
	return out, nil
}

var (
	exceptionCode = regexp.MustCompile(`^\s*Code: (\d+)[.,]`)
	// passing are exceptions that a later try may not meet: timeouts, too much at
	// once, networks, memory, Keeper and replicas.
	passing = []int{3, 32, 159, 160, 161, 162, 163, 202, 203, 209, 210, 225, 236, 241, 242, 252, 279, 285, 286, 319, 394, 425, 439, 999}
)

// failure makes an error of an answer with another status than 200. The text is the
// server's; it may repeat the statement, which has no secret in it.
func failure(status int, code, text string) error {
	if m := exceptionCode.FindStringSubmatch(text); m != nil && code == "" {
		code = m[1]
	}
	text = strings.Join(strings.Fields(text), " ")
	n, err := strconv.Atoi(code)
	if err != nil { // a proxy's answer
		if status >= 500 || status == http.StatusTooManyRequests {
			return fmt.Errorf("%w: status %d: %.200s", cells.ErrUnavailable, status, text)
		}
		return fmt.Errorf("%w: status %d: %.200s", cells.ErrInvalid, status, text)
	}
	if slices.Contains(passing, n) {
		return fmt.Errorf("%w: %.300s", cells.ErrUnavailable, text)
	}
	return fmt.Errorf("%w: %.300s", cells.ErrInvalid, text)
}

// quoted is a name in a statement.
func quoted(name string) string {
	return "`" + strings.NewReplacer("\\", "\\\\", "`", "\\`").Replace(name) + "`"
}

// literal is a text in a statement.
func literal(s string) string {
	return "'" + strings.NewReplacer("\\", "\\\\", "'", "\\'").Replace(s) + "'"
}

func literals(ss []string) string {
	out := make([]string, len(ss))
	for i, s := range ss {
		out[i] = literal(s)
	}
	return strings.Join(out, ", ")
}
