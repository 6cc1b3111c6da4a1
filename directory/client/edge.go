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
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// EdgeClient reads the topology, and reports, over the channel. Safe for concurrent use.
type EdgeClient struct {
	http *http.Client
	base string
}

// Edge returns a client of the channel listener at base. h is a client of package
// channel that reaches directories only.
func Edge(h *http.Client, base string) (*EdgeClient, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
		return nil, fmt.Errorf("%w: the directory's channel address is https://host[:port]", cells.ErrInvalid)
	}
	return &EdgeClient{http: h, base: "https://" + u.Host}, nil
}

func (e *EdgeClient) get(ctx context.Context, query string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.base+api.PathTopology+query, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	return e.do(req)
}

// do returns an answer of the directory with status 200.
func (e *EdgeClient) do(req *http.Request) (*http.Response, error) {
	resp, err := e.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("directory: %w: %w", cells.ErrUnavailable, err)
	}
	if resp.StatusCode == http.StatusOK && fromDirectory(resp) {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	if a, ok := cells.ReadProblem(resp); ok {
		return nil, a
	}
	return nil, fmt.Errorf("%w: %s answered %s, which is no answer of a directory", cells.ErrUnavailable, e.base, resp.Status)
}

// Topology returns the present topology.
func (e *EdgeClient) Topology(ctx context.Context) (api.Topology, error) {
	var out api.Topology
	resp, err := e.get(ctx, "")
	if err != nil {
		return out, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&out); err != nil {
		return out, fmt.Errorf("%w: reading the topology: %w", cells.ErrUnavailable, err)
	}
	return out, nil
}

// WatchTopology calls f with the topology now and after each change, and with nil
// as a sign of life. It returns when the watch ends: f's error, the context's, or
// an error that wraps [ErrWatchBroken] or [cells.ErrUnavailable]. The caller
// watches again; the first topology of the next watch is complete.
func (e *EdgeClient) WatchTopology(ctx context.Context, f func(*api.Topology) error) error {
	watching, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := e.get(watching, "?watch=1")
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	err = readLines(resp.Body, cancel, func(line []byte) error {
		var l api.TopologyLine
		if err := json.Unmarshal(line, &l); err != nil {
			return err
		}
		if err := f(l.Topology); err != nil {
			return &stopError{err}
		}
		return nil
	})
	var stop *stopError
	switch {
	case errors.As(err, &stop):
		return stop.err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, ErrWatchBroken):
		return err
	}
	return fmt.Errorf("%w: %w", ErrWatchBroken, err)
}

// ReportVitals tells the directory how requests went. A report that did not arrive is
// made up for by the next one. Errors are as those of [EdgeClient.ReportSeen].
func (e *EdgeClient) ReportVitals(ctx context.Context, r api.VitalsReport) error {
	return e.report(ctx, api.PathVitals, r)
}

// ReportSeen tells the directory what clients saw of moves. Sending a report again is
// no harm. Errors are refusals of the directory, or wrap [cells.ErrUnavailable].
func (e *EdgeClient) ReportSeen(ctx context.Context, r api.SeenReport) error {
	return e.report(ctx, api.PathSeen, r)
}

func (e *EdgeClient) report(ctx context.Context, path string, r any) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.base+path, bytes.NewReader(b))
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	req.Header.Set("Content-Type", api.ContentJSON)
	resp, err := e.do(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}
