// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

// channelHandler serves cells and edges. Every path names the roles that may
// call it; [channel.Channel.Require] judges each request anew.
func (s *Server) channelHandler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h endpoint, roles ...channel.Role) {
		mux.Handle(pattern, s.cfg.Channel.Require(s.serve(peerName, h), roles...))
	}
	handle("POST "+member.PathHeartbeat, s.postHeartbeat, channel.RoleCell)
	handle("POST "+member.PathLeave, s.postLeave, channel.RoleCell)
	handle("POST "+api.PathPlacements, s.postOwnPlacement, channel.RoleCell)
	handle("GET "+api.PathTopology, s.getTopology, channel.RoleEdge)
	handle("POST "+api.PathSeen, s.postSeen, channel.RoleEdge)
	handle("POST "+api.PathVitals, s.postVitals, channel.RoleEdge)
	handle("GET "+api.PathSpecs, s.getSpecs, channel.RoleProvisioner)
	handle("POST "+api.PathSpecStatus, s.postStatus, channel.RoleProvisioner)
	handle("GET "+api.PathLiving, s.getLiving, channel.RoleProvisioner)
	routes := s.cfg.Channel.Require(s.routes, channel.RoleCell, channel.RoleEdge)
	mux.Handle(member.PathRoutes, routes)
	mux.Handle(member.PathRoutes+"/", routes)
	handle("/", notServed)
	return mux
}

func peerName(r *http.Request) string {
	id, _ := channel.PeerFrom(r)
	return string(id.Role) + "/" + id.Name
}

// selfCell is the cell that the request comes from.
func selfCell(r *http.Request) cells.CellID {
	id, _ := channel.PeerFrom(r)
	return cells.CellID(id.Name)
}

func forbidden(self, named cells.CellID) error {
	return &cells.Answer{Code: cells.CodeForbidden, Cell: self,
		Detail: fmt.Sprintf("the certificate is cell %s's, the request speaks for cell %q", self, named)}
}

func (s *Server) heartbeat(w http.ResponseWriter, r *http.Request) (member.Heartbeat, error) {
	var h member.Heartbeat
	// A newer build's processes may say more than this one knows.
	if err := decodeJSON(w, r, &h, false); err != nil {
		return h, err
	}
	self := selfCell(r)
	if h.Cell != self {
		return h, forbidden(self, h.Cell)
	}
	if cells.MoveID(h.Instance).Validate() != nil {
		return h, bad("instance must have 1 to 64 bytes of [A-Za-z0-9._-]")
	}
	h.Version, h.Reason, h.Engine = clip(h.Version, 128), clip(h.Reason, 1024), clip(h.Engine, 64)
	if err := checkURL("service_url", h.ServiceURL, "http", "https"); err != nil {
		return h, err
	}
	return h, checkURL("agent_url", h.AgentURL, "https")
}

// clip cuts what is only for people to n bytes.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "")
}

func checkURL(name, raw string, schemes ...string) error {
	if raw == "" {
		return nil
	}
	u, err := url.Parse(raw)
	if err != nil || len(raw) > 512 || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return bad("%s is not scheme://host[:port]", name)
	}
	for _, s := range schemes {
		if u.Scheme == s {
			return nil
		}
	}
	return bad("%s has scheme %q, want one of %v", name, u.Scheme, schemes)
}

func (s *Server) postHeartbeat(w http.ResponseWriter, r *http.Request) (int, any, error) {
	h, err := s.heartbeat(w, r)
	if err != nil {
		return 0, nil, err
	}
	if _, ok := s.fleet.cell(h.Cell); !ok {
		return 0, nil, unknownCell(h.Cell)
	}
	s.vitals.heartbeat(&h)
	s.members.beat(h)
	return http.StatusOK, member.HeartbeatReply{Every: s.cfg.HeartbeatEvery, Lapse: s.cfg.Lapse}, nil
}

func (s *Server) postLeave(w http.ResponseWriter, r *http.Request) (int, any, error) {
	h, err := s.heartbeat(w, r)
	if err != nil {
		return 0, nil, err
	}
	s.vitals.heartbeat(&h)
	if err := s.members.leave(r.Context(), keyOf(&h)); err != nil {
		s.log.Warn("leave not written", "cell", h.Cell, "instance", h.Instance, "err", err)
	}
	return http.StatusOK, struct{}{}, nil
}

// postOwnPlacement places a tenant for the calling cell, in that cell.
func (s *Server) postOwnPlacement(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.PlacementRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if req.Actor == "" {
		req.Actor = peerName(r)
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, badTenant(req.Tenant, err)
	}
	self := selfCell(r)
	if req.Cell == "" {
		req.Cell = self
	}
	if req.Cell != self {
		return 0, nil, forbidden(self, req.Cell)
	}
	if err := s.rates.take(self); err != nil {
		return 0, nil, err
	}
	return placed(s.place(r.Context(), req, callerOf(r.Context()).as(req.Actor)))
}

func (s *Server) getTopology(w http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "watch")
	if err != nil {
		return 0, nil, err
	}
	if q["watch"] == "" {
		t := s.fleet.snapshot()
		return http.StatusOK, t, nil
	}
	out := newLines(w)
	alive := time.NewTicker(s.cfg.AliveEvery)
	defer alive.Stop()
	var sent int64
	for {
		changed := s.fleet.changed.next()
		line := api.TopologyLine{Alive: true}
		if t := s.fleet.snapshot(); t.Serial != sent {
			sent = t.Serial
			line = api.TopologyLine{Topology: &t}
		}
		if err := out.send(line); err != nil {
			return 0, nil, nil
		}
		select {
		case <-changed:
		case <-alive.C:
		case <-r.Context().Done():
			return 0, nil, nil
		case <-s.ctx.Done():
			return 0, nil, nil
		}
	}
}
