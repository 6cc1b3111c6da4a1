// SPDX-License-Identifier: Apache-2.0

package etcdtest

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// patience bounds the start of a server.
const patience = 60 * time.Second

// Server is an etcd server in this process.
type Server struct {
	*embed.Etcd
	URL string // of its client listener
	cfg *embed.Config
	off bool
}

// Start starts a server of one member whose data is in dir.
func Start(dir string, edit ...func(*embed.Config)) (*Server, error) {
	servers, err := StartCluster(dir, 1, edit...)
	if err != nil {
		return nil, err
	}
	return servers[0], nil
}

// StartCluster starts n servers that are one cluster, with their data below dir.
// Close each. On an error none is left.
func StartCluster(dir string, n int, edit ...func(*embed.Config)) ([]*Server, error) {
	var configs []*embed.Config
	var initial []string
	for i := range n {
		cfg := embed.NewConfig()
		cfg.Name = fmt.Sprintf("m%d", i)
		cfg.Dir = filepath.Join(dir, cfg.Name)
		cfg.LogLevel, cfg.LogOutputs = "panic", []string{os.DevNull}
		cfg.UnsafeNoFsync = true // these servers are stopped, not crashed
		cfg.TickMs, cfg.ElectionMs = 50, 500
		peer, err := freeURL()
		if err != nil {
			return nil, err
		}
		client, err := freeURL()
		if err != nil {
			return nil, err
		}
		cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
		cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
		initial = append(initial, cfg.Name+"="+peer.String())
		configs = append(configs, cfg)
	}
	var servers []*Server
	for _, cfg := range configs {
		cfg.InitialCluster = strings.Join(initial, ",")
		for _, f := range edit {
			f(cfg)
		}
		e, err := embed.StartEtcd(cfg)
		if err != nil {
			closeAll(servers)
			return nil, err
		}
		servers = append(servers, &Server{Etcd: e, URL: cfg.AdvertiseClientUrls[0].String(), cfg: cfg})
	}
	for _, s := range servers {
		if err := s.ready(); err != nil {
			closeAll(servers)
			return nil, err
		}
	}
	return servers, nil
}

func (s *Server) ready() error {
	select {
	case <-s.Server.ReadyNotify():
		return nil
	case err := <-s.Err():
		return err
	case <-time.After(patience):
		return fmt.Errorf("etcd did not start within %s", patience)
	}
}

// Close stops the server; one that is stopped stays so. It is not safe beside
// Restart.
func (s *Server) Close() {
	if !s.off {
		s.off = true
		s.Etcd.Close()
	}
}

// Restart starts a server again that was closed, with its data and its addresses.
func (s *Server) Restart() error {
	s.cfg.ClusterState = embed.ClusterStateFlagExisting
	e, err := embed.StartEtcd(s.cfg)
	if err != nil {
		return err
	}
	s.Etcd, s.off = e, false
	return s.ready()
}

func closeAll(servers []*Server) {
	for _, s := range servers {
		s.Close()
	}
}

// freeURL is an address that was free a moment ago.
func freeURL() (*url.URL, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	return &url.URL{Scheme: "http", Host: l.Addr().String()}, nil
}
