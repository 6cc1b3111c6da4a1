// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// maxReply bounds what is read of the directory's answers.
const maxReply = 64 << 10

// CellState is the directory's answer about one cell.
type CellState struct {
	Cell cells.CellID `json:"cell"`
	// State is "attaching" or "serving".
	State string `json:"state"`
	// First says that it is the first cell.
	First bool `json:"first"`
}

// HTTPRouter asks the directory over its router's address, with the cell's
// credential: POST /cells/v1/placements and GET /cells/v1/cells/<cell>.
type HTTPRouter struct {
	base   string
	token  string
	client *http.Client
}

var _ Router = (*HTTPRouter)(nil)

// NewHTTPRouter returns the router at base (http or https, an address within the
// deployment's network, without user, path or query). A nil client has the system's
// roots. Redirects are never followed: they would carry the credential elsewhere.
// The error wraps [cells.ErrInvalid] and does not hold the token.
func NewHTTPRouter(base, token string, client *http.Client) (*HTTPRouter, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "" {
		return nil, fmt.Errorf("%w: CELL_ROUTER_URL: want http://host:port or https://host:port", cells.ErrInvalid)
	}
	if !routerToken.MatchString(token) {
		return nil, fmt.Errorf("%w: CELL_ROUTER_TOKEN: it is not lcr_ and 128 lowercase hexadecimal digits", cells.ErrInvalid)
	}
	c := http.Client{}
	if client != nil {
		c = *client
	}
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &HTTPRouter{base: u.Scheme + "://" + u.Host, token: token, client: &c}, nil
}

// Place implements [Placer].
func (h *HTTPRouter) Place(ctx context.Context, c PlaceCall) (w Winner, err error) {
	body, err := json.Marshal(c)
	if err != nil {
		return w, err
	}
	if err := h.do(ctx, http.MethodPost, "/cells/v1/placements", body, &w); err != nil {
		return Winner{}, fmt.Errorf("placing tenant %s: %w", c.Tenant, err)
	}
	return w, nil
}

// Attaching implements [StateReader]. An answer that names another cell, no state or
// a cell that is not the first is an error or false, never true.
func (h *HTTPRouter) Attaching(ctx context.Context, cell cells.CellID) (bool, error) {
	if err := cell.Validate(); err != nil {
		return false, err
	}
	var s CellState
	if err := h.do(ctx, http.MethodGet, "/cells/v1/cells/"+string(cell), nil, &s); err != nil {
		return false, fmt.Errorf("reading the state of cell %s: %w", cell, err)
	}
	if s.Cell != cell || s.State != "attaching" && s.State != "serving" {
		return false, fmt.Errorf("%w: the answer about cell %s is about %q in state %q", cells.ErrUnavailable, cell, s.Cell, s.State)
	}
	return s.First && s.State == "attaching", nil
}

func (h *HTTPRouter) do(ctx context.Context, method, path string, body []byte, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, h.base+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+h.token)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := h.client.Do(req)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		if a, ok := cells.ReadProblem(resp); ok {
			if a.RetryAfter == 0 {
				if d, err := time.ParseDuration(resp.Header.Get("Retry-After") + "s"); err == nil && d > 0 {
					a.RetryAfter = d
				}
			}
			return a
		}
		return fmt.Errorf("%w: status %d", cells.ErrUnavailable, resp.StatusCode)
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReply+1))
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	if len(b) > maxReply {
		return fmt.Errorf("%w: an answer of more than %d bytes", cells.ErrUnavailable, maxReply)
	}
	// A newer directory may say more.
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("%w: the answer is malformed: %w", cells.ErrUnavailable, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: there is something behind the answer", cells.ErrUnavailable)
	}
	return nil
}
