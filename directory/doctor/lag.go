// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/client"
)

// routerState is what the doctor reads of a router's /readyz on its admin listener.
type routerState struct {
	Router string `json:"router"`
	Ready  bool   `json:"ready"`
	Reason string `json:"reason"`
	Routes struct {
		Revision  cells.Revision `json:"revision"`
		AgeMS     int64          `json:"age_ms"`
		Stale     bool           `json:"stale"`
		Source    string         `json:"source"`
		Watching  bool           `json:"watching"`
		LastError string         `json:"last_error"`
	} `json:"routes"`
	Cells *struct {
		Known     bool          `json:"known"`
		Source    string        `json:"source"`
		Age       time.Duration `json:"age"`
		Stale     bool          `json:"stale"`
		Problems  []string      `json:"problems"`
		LastError string        `json:"last_error"`
		Snapshot  string        `json:"snapshot_error"`
	} `json:"cells"`
}

// maxRouterState bounds a router's answer, in bytes.
const maxRouterState = 1 << 20

func askRouter(ctx context.Context, r Router) (s routerState, _ error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.Admin+"/readyz", nil)
	if err != nil {
		return s, fmt.Errorf("router %s: %w", r.Name, err)
	}
	t := &http.Transport{DisableKeepAlives: true}
	defer t.CloseIdleConnections()
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return s, fmt.Errorf("router %s: %w", r.Name, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxRouterState))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("router %s: its admin listener answers %s: %w", r.Name, resp.Status, err)
	}
	return s, nil
}

// checkLag reads the directory's revision and waits until everybody has seen it. Without
// the directory it judges by what routers say of themselves.
func checkLag(ctx context.Context, x *exam) (out []Finding, _ error) {
	var errs []error
	var want cells.Revision
	cl, err := x.directory(ctx)
	if err == nil {
		page, perr := cl.Tenants(ctx, client.TenantQuery{Limit: 1, Deleted: true})
		want, err = page.Revision, perr
		if err != nil {
			err = fmt.Errorf("the directory: %w", err)
		}
	}
	known := err == nil
	errs = append(errs, err)
	asked := time.Now()
	for _, r := range x.src.Routers {
		f, err := x.routerLag(ctx, r, want, asked)
		if errs = append(errs, err); f != nil {
			out = append(out, *f)
		}
	}
	if known {
		found, err := x.processLag(ctx, want, asked)
		out, errs = append(out, found...), append(errs, err)
	}
	return out, errors.Join(errs...)
}

func (x *exam) routerLag(ctx context.Context, r Router, want cells.Revision, asked time.Time) (*Finding, error) {
	for {
		s, err := askRouter(ctx, r)
		if err != nil {
			return &Finding{Message: "it cannot be asked: " + reason(err), Fix: "start it, or take it out of what is examined"}, nil
		}
		if s.Cells != nil {
			return nil, nil // it routes whole deployments, and no tenants
		}
		age := time.Duration(s.Routes.AgeMS) * time.Millisecond
		bad := ""
		switch {
		case s.Routes.Stale, !s.Routes.Watching:
			bad = fmt.Sprintf("router %s is cut off from the directory for %s; it goes by %q at revision %d (%s)", r.Name, age.Round(time.Millisecond), s.Routes.Source, s.Routes.Revision, s.Routes.LastError)
		case s.Routes.Revision < want:
			bad = fmt.Sprintf("router %s is at revision %d of the routes %s after the directory was at %d", r.Name, s.Routes.Revision, time.Since(asked).Round(time.Millisecond), want)
		default:
			return nil, nil
		}
		if time.Since(asked) > x.o.Lag {
			return &Finding{Message: bad}, nil
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return &Finding{Message: bad}, nil
		}
	}
}

func (x *exam) processLag(ctx context.Context, want cells.Revision, asked time.Time) (out []Finding, _ error) {
	for {
		x.members, out = nil, nil
		list, err := x.processes(ctx)
		if err != nil {
			return nil, err
		}
		for _, m := range list {
			if m.Live && !m.Replaced && m.Revision < want {
				out = append(out, Finding{Cell: m.Cell, Message: fmt.Sprintf("process %s is at revision %d of the routes %s after the directory was at %d", m.Instance, m.Revision, time.Since(asked).Round(time.Millisecond), want)})
			}
		}
		if len(out) == 0 || time.Since(asked) > x.o.Lag {
			return out, nil
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return out, err
		}
	}
}
