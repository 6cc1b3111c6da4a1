// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/internal/freeport"
)

// options are the command line's.
type options struct {
	rounds     int
	requests   int
	conns      int
	peers      []string
	cases      []string
	json       bool
	keep       bool
	cpuprofile string
}

// bench is one measurement: the programs that run, and what they share.
type bench struct {
	kind      string // http, grpc, tls
	opt       options
	self      string // this program
	dir       string
	env       []string
	procsEach int // cores that each proxy may use
	cells     []int
	cert, key string
	procs     []*process
}

// testCase is one kind of request.
type testCase struct {
	name  string
	share float64 // of --requests
	bytes int     // of one answer, for throughput; 0 is not reported
	// connect opens the connections of the load.
	connect func(ctx context.Context, p *peer) (runner, error)
}

// runner sends requests over connections that it keeps. It fails on any wrong answer.
type runner interface {
	run(n int) (*loadResult, error)
	close()
}

func parseOptions(kind string, args []string) (options, error) {
	var o options
	fs := flag.NewFlagSet(kind, flag.ContinueOnError)
	fs.IntVar(&o.rounds, "rounds", 7, "rounds; each proxy has its turn in each")
	fs.IntVar(&o.requests, "requests", 10000, "requests of a turn; cases of long answers have fewer")
	fs.IntVar(&o.conns, "conns", 128, "requests at the same time, each on a connection of its own by HTTP/1.1")
	peers := fs.String("peers", "edge,nginx,haproxy,reverseproxy", "proxies to measure, with commas; edge is the one that the others are compared with")
	cases := fs.String("cases", "", "cases to measure, with commas; all without it")
	fs.BoolVar(&o.json, "json", false, "print JSON instead of a table")
	fs.BoolVar(&o.keep, "keep", false, "keep the folder with configurations and logs, and say where it is")
	fs.StringVar(&o.cpuprofile, "cpuprofile", "", "write a CPU profile of the edge to this file")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	o.peers = strings.Split(*peers, ",")
	if *cases != "" {
		o.cases = strings.Split(*cases, ",")
	}
	if o.rounds < 1 || o.requests < 1 || o.conns < 1 || fs.NArg() > 0 {
		return o, errors.New("--rounds, --requests and --conns are at least 1, and there are no arguments")
	}
	if o.cpuprofile != "" {
		abs, err := filepath.Abs(o.cpuprofile)
		if err != nil {
			return o, err
		}
		o.cpuprofile = abs
	}
	return o, nil
}

// measure is http, grpc and tls.
func measure(ctx context.Context, kind string, args []string, out io.Writer) (err error) {
	opt, err := parseOptions(kind, args)
	if err != nil {
		return err
	}
	b := &bench{kind: kind, opt: opt, procsEach: runtime.NumCPU()}
	b.env = []string{"GOMAXPROCS=" + strconv.Itoa(b.procsEach)}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp("", "edgebench-"); err != nil {
		return err
	}
	defer func() {
		for i := len(b.procs) - 1; i >= 0; i-- {
			b.procs[i].stop()
		}
		if opt.keep {
			fmt.Fprintln(os.Stderr, "configurations and logs:", b.dir)
			return
		}
		err = errors.Join(err, os.RemoveAll(b.dir))
	}()
	if kind == "tls" {
		if err := b.certificate(); err != nil {
			return err
		}
	}
	if err := b.startCells(ctx); err != nil {
		return err
	}
	var peers []*peer
	for _, name := range opt.peers {
		p, err := b.startPeer(ctx, name)
		if err != nil {
			return err
		}
		if err := b.check(ctx, p); err != nil {
			return b.explained(fmt.Errorf("%s does not do the equivalent: %w", name, err))
		}
		peers = append(peers, p)
	}
	cases, err := chosen(b.testCases(), opt.cases)
	if err != nil {
		return err
	}
	res, err := b.measureAll(ctx, peers, cases)
	if err != nil {
		return b.explained(err)
	}
	if opt.json {
		return res.writeJSON(out)
	}
	return res.writeTable(out)
}

// explained adds what the programs have said.
func (b *bench) explained(err error) error {
	for _, p := range b.procs {
		if said, _ := os.ReadFile(p.output); len(said) > 0 {
			err = fmt.Errorf("%w\n%s: %s", err, filepath.Base(p.output), said[:min(len(said), 2000)])
		}
	}
	return err
}

// startCells starts the backend.
func (b *bench) startCells(ctx context.Context) error {
	name := "backend"
	if b.kind == "grpc" {
		name = "grpc-backend"
	}
	var ports []string
	for range cellCount {
		port, err := freeport.Port()
		if err != nil {
			return err
		}
		b.cells = append(b.cells, port)
		ports = append(ports, strconv.Itoa(port))
	}
	p, err := b.start(name, b.self, name, "--ports", strings.Join(ports, ","))
	if err != nil {
		return err
	}
	return p.up(ctx, b.cells[cellCount-1])
}

func (b *bench) testCases() []testCase {
	switch b.kind {
	case "grpc":
		return b.grpcCases()
	case "tls":
		return b.tlsCases()
	}
	plain := func(method, path string, body, answer int) func(context.Context, *peer) (runner, error) {
		requests := requestsOf(method, path, body)
		return func(_ context.Context, p *peer) (runner, error) {
			return newGenerator(load{port: p.port, conns: b.opt.conns, requests: requests, bytes: answer})
		}
	}
	return []testCase{
		{name: "get-200", share: 1, connect: plain("GET", pathSmall, 0, smallBytes)},
		{name: "get-64k", share: 0.5, bytes: largeBytes, connect: plain("GET", pathLarge, 0, largeBytes)},
		{name: "post-1k", share: 1, connect: plain("POST", pathPost, postBytes, smallBytes)},
	}
}

// chosen returns the cases of these names, all if there are none.
func chosen(all []testCase, names []string) ([]testCase, error) {
	if len(names) == 0 {
		return all, nil
	}
	var out []testCase
next:
	for _, name := range names {
		for _, c := range all {
			if c.name == name {
				out = append(out, c)
				continue next
			}
		}
		return nil, fmt.Errorf("%q is no case", name)
	}
	return out, nil
}

// measureAll runs the rounds. The order of the proxies rotates from round to round.
func (b *bench) measureAll(ctx context.Context, peers []*peer, cases []testCase) (*results, error) {
	res := &results{Machine: machine(), Kind: b.kind, Rounds: b.opt.rounds, Requests: b.opt.requests, Connections: b.opt.conns, Versions: map[string]string{}}
	for _, p := range peers {
		res.Versions[p.name] = versionOf(p.name)
	}
	for _, c := range cases {
		cr := caseResult{Case: c.name}
		for _, p := range peers {
			cr.Peers = append(cr.Peers, peerResult{Peer: p.name})
		}
		n := max(int(float64(b.opt.requests)*c.share), 1)
		for round := range b.opt.rounds {
			for k := range peers {
				i := (round + k) % len(peers)
				if err := ctx.Err(); err != nil {
					return nil, err
				}
				s, err := b.turn(ctx, peers[i], c, n)
				if err != nil {
					return nil, fmt.Errorf("%s, %s: %w", c.name, peers[i].name, err)
				}
				cr.Peers[i].samples = append(cr.Peers[i].samples, s)
			}
		}
		cr.finish()
		res.Cases = append(res.Cases, cr)
	}
	return res, nil
}

// sample is one turn of one proxy.
type sample struct {
	cpu      time.Duration // of one request
	rate     float64       // requests a second
	mbCPU    float64       // MB for each second of CPU
	p50, p99 time.Duration
}

// turn measures one proxy once, over new connections that are warm.
func (b *bench) turn(ctx context.Context, p *peer, c testCase, n int) (s sample, err error) {
	r, err := c.connect(ctx, p)
	if err != nil {
		return s, err
	}
	defer r.close()
	if _, err := r.run(min(n, 4*b.opt.conns)); err != nil {
		return s, fmt.Errorf("warming up: %w", err)
	}
	before, err := cpuOfAll(p.pids)
	if err != nil {
		return s, err
	}
	res, err := r.run(n)
	if err != nil {
		return s, err
	}
	after, err := cpuOfAll(p.pids)
	if err != nil {
		return s, err
	}
	used := after - before
	s = sample{
		cpu: used / time.Duration(n), rate: float64(n) / res.took.Seconds(),
		p50: res.latency.quantile(0.5), p99: res.latency.quantile(0.99),
	}
	if c.bytes > 0 {
		s.mbCPU = float64(n) * float64(c.bytes) / 1e6 / used.Seconds()
	}
	return s, nil
}
