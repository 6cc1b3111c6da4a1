// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
)

// Versions lists the catalogue.
func (c *Client) Versions(ctx context.Context) ([]provision.Version, error) {
	var out api.VersionList
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathVersions}, &out)
	return out.Versions, err
}

func versionPath(name string) (string, error) {
	return api.PathVersions + "/" + url.PathEscape(name), provision.CheckVersionName(name)
}

// PutVersion adds a version to the catalogue. CONFLICT when there is one of the name that
// says something else, unless Replace is set.
func (c *Client) PutVersion(ctx context.Context, name string, r api.VersionRequest) (provision.Version, error) {
	var out provision.Version
	path, err := versionPath(name)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodPut, path: path, body: r}, &out)
	}
	return out, err
}

// RemoveVersion removes a version. CONFLICT while a cell is pinned to it; NOT_FOUND.
func (c *Client) RemoveVersion(ctx context.Context, name, actor string) error {
	path, err := versionPath(name)
	if err == nil {
		q := url.Values{}
		set(q, "actor", actor)
		_, err = c.call(ctx, request{method: http.MethodDelete, path: path, query: q}, &struct{}{})
	}
	return err
}

// ProvisionedCells lists the cells that are provisioned, in order of their ids.
func (c *Client) ProvisionedCells(ctx context.Context) ([]api.Provisioned, error) {
	var out api.ProvisionedList
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathProvisioned}, &out)
	return out.Cells, err
}

func (c *Client) provisioned(ctx context.Context, method string, cell cells.CellID, rest string, q url.Values, body any) (api.Provisioned, error) {
	var out api.Provisioned
	if err := cell.Validate(); err != nil {
		return out, err
	}
	_, err := c.call(ctx, request{method: method, path: api.PathProvisioned + "/" + string(cell) + rest, query: q, body: body}, &out)
	return out, err
}

// ProvisionedCell returns one; NOT_FOUND. With left it says what keeps the cell from
// being retired, which asks the cell's own processes and reads all routes.
func (c *Client) ProvisionedCell(ctx context.Context, cell cells.CellID, left bool) (api.Provisioned, error) {
	q := url.Values{}
	if left {
		q.Set("left", "1")
	}
	return c.provisioned(ctx, http.MethodGet, cell, "", q, nil)
}

// ProvisionCell says what a cell should be: it is made, changed, or serves again. The
// provisioner of the fleet does it afterwards: see [Client.WatchProvisioned].
func (c *Client) ProvisionCell(ctx context.Context, cell cells.CellID, r api.ProvisionRequest) (api.Provisioned, error) {
	return c.provisioned(ctx, http.MethodPut, cell, "", nil, r)
}

// UpgradeCell pins a serving cell to another version, or changes its number of processes.
func (c *Client) UpgradeCell(ctx context.Context, cell cells.CellID, r api.UpgradeRequest) (api.Provisioned, error) {
	return c.provisioned(ctx, http.MethodPost, cell, "/upgrade", nil, r)
}

// DrainCell closes a cell and has a campaign move its tenants away.
func (c *Client) DrainCell(ctx context.Context, cell cells.CellID, r api.DrainRequest) (api.Provisioned, error) {
	return c.provisioned(ctx, http.MethodPost, cell, "/drain", nil, r)
}

// RetireCell has a drained cell removed. CONFLICT names what is left of tenants;
// CELL_UNREACHABLE when the cell's own store could not be asked and Force is not set.
func (c *Client) RetireCell(ctx context.Context, cell cells.CellID, r api.RetireRequest) (api.Provisioned, error) {
	return c.provisioned(ctx, http.MethodPost, cell, "/retire", nil, r)
}

// WatchProvisioned calls f with the cell now and whenever it has changed, until it is
// as it should be, or f returns an error, which is returned. It asks twice a second. A
// directory that cannot be reached for half a minute ends it with [ErrWatchBroken].
func (c *Client) WatchProvisioned(ctx context.Context, cell cells.CellID, f func(api.Provisioned) error) error {
	last := ""
	return poll(ctx, 500*time.Millisecond, "cell "+string(cell), func(ctx context.Context) (api.Provisioned, error) { return c.ProvisionedCell(ctx, cell, false) }, func(p api.Provisioned) (bool, error) {
		now := p
		now.Progress.Elapsed, now.Progress.Left, now.Status.At = 0, 0, time.Time{}
		text, err := json.Marshal(now)
		if err != nil {
			return false, err
		}
		if string(text) == last && !p.Progress.Reached {
			return false, nil
		}
		last = string(text)
		return p.Progress.Reached, f(p)
	})
}

// ProvisionerClient is a provisioner's client of the channel listener: it implements
// [provision.Source]. Safe for concurrent use.
type ProvisionerClient struct{ edge EdgeClient }

var _ provision.Source = (*ProvisionerClient)(nil)

// Provisioner returns a client of the channel listener at base. h is a client of
// package channel, for a certificate of the role provisioner, that reaches
// directories only.
func Provisioner(h *http.Client, base string) (*ProvisionerClient, error) {
	e, err := Edge(h, base)
	if err != nil {
		return nil, err
	}
	return &ProvisionerClient{*e}, nil
}

// CloseIdleConnections frees connections that are not in use.
func (p *ProvisionerClient) CloseIdleConnections() { p.edge.http.CloseIdleConnections() }

func (p *ProvisionerClient) get(ctx context.Context, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.edge.base+path, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	return p.edge.do(req)
}

// Watch implements [provision.Source].
func (p *ProvisionerClient) Watch(ctx context.Context, f func([]provision.Record)) error {
	watching, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := p.get(watching, api.PathSpecs+"?watch=1")
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	err = readLines(resp.Body, cancel, func(line []byte) error {
		var l api.SpecLine
		if err := json.Unmarshal(line, &l); err != nil {
			return err
		}
		if l.Specs != nil {
			f(l.Specs.Records)
		}
		return nil
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, ErrWatchBroken):
		return err
	}
	return fmt.Errorf("%w: %w", ErrWatchBroken, err)
}

// Report implements [provision.Source].
func (p *ProvisionerClient) Report(ctx context.Context, st provision.Status) error {
	b, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.edge.base+api.PathSpecStatus, bytes.NewReader(b))
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req.Header.Set("Content-Type", api.ContentJSON)
	resp, err := p.edge.do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Living implements [provision.Source].
func (p *ProvisionerClient) Living(ctx context.Context, cell cells.CellID) ([]provision.Live, error) {
	resp, err := p.get(ctx, api.PathLiving+"?cell="+url.QueryEscape(string(cell)))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	var out api.LivingList
	dec := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer))
	if err := dec.Decode(&out); err != nil {
		return nil, fmt.Errorf("%w: reading who lives: %w", cells.ErrUnavailable, err)
	}
	return out.Processes, nil
}
