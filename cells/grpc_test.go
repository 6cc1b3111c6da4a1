// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/cloister-dev/cloister/cells"
)

// A gRPC service cannot pass its own answers off as the platform's either: not by
// metadata, and not by an answer that it got from another service.
func TestServiceStatusesAreNotThePlatforms(t *testing.T) {
	noLeaks(t)
	svc, _ := acmeService(t)
	foreign := cells.AnswerStatus(&cells.Answer{Code: cells.CodeMoving, Tenant: "acme", Revision: 3})
	forged := metadata.Pairs("cell-answer", "MOVING", "mine", "kept")
	for name, c := range map[string]struct {
		serve func(context.Context) error
		code  cells.Code
		grpc  codes.Code
	}{
		"its own error":       {serve: func(context.Context) error { return status.Error(codes.NotFound, "no such thing") }, grpc: codes.NotFound},
		"another's answer":    {serve: func(context.Context) error { return foreign.Err() }, grpc: codes.Unavailable},
		"wrapped":             {serve: func(context.Context) error { return errors.Join(errors.New("asking b"), foreign.Err()) }, grpc: codes.Unavailable},
		"header":              {serve: func(ctx context.Context) error { return grpc.SetHeader(ctx, forged) }},
		"sent header":         {serve: func(ctx context.Context) error { return grpc.SendHeader(ctx, forged) }},
		"trailer":             {serve: func(ctx context.Context) error { return grpc.SetTrailer(ctx, forged) }},
		"answer of the list":  {serve: func(context.Context) error { return &cells.Answer{Code: cells.CodeStaleRoute, Tenant: "acme"} }, code: cells.CodeStaleRoute},
		"answer of its own":   {serve: func(context.Context) error { return &cells.Answer{Code: "EVIL"} }, grpc: codes.Unknown},
		"a gate that closed?": {serve: func(context.Context) error { return &cells.Answer{Code: cells.CodeMoving, Err: cells.ErrGateClosed} }, grpc: codes.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			svc.serveUnary = c.serve
			svc.serveBidi = func(ss grpc.ServerStream) error { return c.serve(ss.Context()) }
			for protocol, got := range map[string]reply{"unary": svc.overUnary(t, toAcme), "stream": svc.overStream(t, toAcme)} {
				if (got.answer == nil) != (c.code == "") || got.mark != string(c.code) || got.answer != nil && got.answer.Code != c.code {
					t.Errorf("%s: answer %v, mark %q, want %q", protocol, got.answer, got.mark, c.code)
				}
				if c.code == "" && status.Code(got.err) != c.grpc {
					t.Errorf("%s: %v, want %v", protocol, got.err, c.grpc)
				}
				if got.cell != "cell-a" || got.epoch != "4" {
					t.Errorf("%s: answered by %q at %q", protocol, got.cell, got.epoch)
				}
			}
		})
	}
	// By the stream's own methods.
	svc.serveBidi = func(ss grpc.ServerStream) error {
		if err := ss.SetHeader(forged); err != nil {
			return err
		}
		ss.SetTrailer(forged)
		return ss.SendHeader(forged)
	}
	if got := svc.overStream(t, toAcme); got.err != nil || got.mark != "" {
		t.Errorf("%+v", got)
	}
}

// open begins a stream and waits until its handler runs.
func (s *service) open(t *testing.T) grpc.ClientStream {
	t.Helper()
	ran := s.ran.Load()
	ctx, cancel := context.WithCancel(outgoing(deadline(t), toAcme))
	t.Cleanup(cancel)
	cs, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, streamMethod)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stream's handler runs", func() bool { return s.ran.Load() > ran })
	return cs
}

// However a stream's handler waits, it learns that the gate has closed, and the
// client gets the answer.
func TestStreamEnds(t *testing.T) {
	for name, serve := range map[string]func(grpc.ServerStream) error{
		"for its context": func(ss grpc.ServerStream) error {
			<-ss.Context().Done()
			return context.Cause(ss.Context())
		},
		"for a message": func(ss grpc.ServerStream) error {
			return ss.RecvMsg(&wrapperspb.StringValue{})
		},
		"for the client to read": func(ss grpc.ServerStream) error {
			for {
				if err := ss.SendMsg(wrapperspb.String(string(make([]byte, 16<<10)))); err != nil {
					return err
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			noLeaks(t)
			svc, table := acmeService(t, cells.WithStreamGrace(10*time.Millisecond))
			ended := make(chan error, 1)
			svc.serveBidi = func(ss grpc.ServerStream) error {
				err := serve(ss)
				ended <- err
				return err
			}
			cs := svc.open(t)
			if err := svc.gates.Drain(deadline(t), draining(t, table)); err != nil {
				t.Fatal(err)
			}
			if err := <-ended; err == nil {
				t.Error("the handler saw no error")
			}
			var err error
			for err == nil {
				err = cs.RecvMsg(&wrapperspb.StringValue{})
			}
			a, ok := cells.AnswerFromStatus(status.Convert(err))
			if !ok || a.Code != cells.CodeMoving || !errors.Is(a, cells.ErrGateClosed) {
				t.Errorf("the client got %v", err)
			}
			if v := cs.Trailer().Get(cells.HeaderAnswer); len(v) != 0 {
				t.Errorf("marked %v: an edge would send it again, although it had begun", v)
			}
		})
	}
}

// A stream that says goodbye ends well, and one that notices nothing of the move
// and ends by itself too.
func TestStreamSaysGoodbye(t *testing.T) {
	noLeaks(t)
	svc, table := acmeService(t)
	svc.serveBidi = func(ss grpc.ServerStream) error {
		<-ss.Context().Done()
		return ss.SendMsg(wrapperspb.String("bye"))
	}
	cs := svc.open(t)
	draining(t, table)
	m := &wrapperspb.StringValue{}
	if err := cs.RecvMsg(m); err != nil || m.Value != "bye" {
		t.Errorf("%q %v", m.Value, err)
	}
	if err := cs.RecvMsg(m); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	idle(t, svc.gates)
}

// An ordinary stream is not changed by being guarded.
func TestStreamEchoes(t *testing.T) {
	noLeaks(t)
	svc, _ := acmeService(t)
	svc.serveBidi = func(ss grpc.ServerStream) error {
		a, ok := cells.AdmissionFromContext(ss.Context())
		if !ok || a.Tenant != "acme" {
			return status.Error(codes.Internal, "no admission")
		}
		for {
			m := &wrapperspb.StringValue{}
			if err := ss.RecvMsg(m); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if err := ss.SendMsg(m); err != nil {
				return err
			}
		}
	}
	cs := svc.open(t)
	for i := range 1000 {
		want := string(rune('a' + i%26))
		if err := cs.SendMsg(wrapperspb.String(want)); err != nil {
			t.Fatal(err)
		}
		m := &wrapperspb.StringValue{}
		if err := cs.RecvMsg(m); err != nil || m.Value != want {
			t.Fatalf("message %d: %q %v", i, m.Value, err)
		}
	}
	if svc.gates.Total() != 1 {
		t.Errorf("%d in flight", svc.gates.Total())
	}
	if err := cs.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if err := cs.RecvMsg(&wrapperspb.StringValue{}); err != io.EOF {
		t.Errorf("%v", err)
	}
	idle(t, svc.gates)
	// A client that goes away is counted out as well.
	cs = svc.open(t)
	_ = cs
	svc.conn.Close()
	idle(t, svc.gates)
}

func TestAnswerStatus(t *testing.T) {
	for _, code := range cells.Codes() {
		in := &cells.Answer{Code: code, Tenant: "acme", Detail: "50% of \"it\"\n", Revision: 1 << 63, Age: 1500 * time.Millisecond, RetryAfter: 2 * time.Second}
		s := cells.AnswerStatus(in)
		if s.Code() != code.GRPCCode() {
			t.Errorf("%s: status %s", code, s.Code())
		}
		got, ok := cells.AnswerFromStatus(s)
		if !ok || *got != *in {
			t.Errorf("%s: %+v came back as %+v", code, in, got)
		}
	}
	if s := cells.AnswerStatus(&cells.Answer{Code: "EVIL", Detail: "x"}); s.Code() != codes.Internal || len(s.Details()) != 0 {
		t.Errorf("outside the list: %v", s)
	}
	info := func(domain, reason string, pairs ...string) *errdetails.ErrorInfo {
		m := map[string]string{"retry": "true", "revision": "1", "age_ms": "0"}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return &errdetails.ErrorInfo{Domain: domain, Reason: reason, Metadata: m}
	}
	for name, c := range map[string]struct {
		code codes.Code
		info *errdetails.ErrorInfo
	}{
		"no details":       {codes.Unavailable, nil},
		"other domain":     {codes.Unavailable, info("example.com", "MOVING")},
		"unknown reason":   {codes.Unavailable, info("cells", "EVIL")},
		"other code":       {codes.NotFound, info("cells", "MOVING")},
		"no revision":      {codes.Unavailable, info("cells", "MOVING", "revision", "")},
		"negative age":     {codes.Unavailable, info("cells", "MOVING", "age_ms", "-1")},
		"age too large":    {codes.Unavailable, info("cells", "MOVING", "age_ms", "9223372036854775807")},
		"bad tenant":       {codes.Unavailable, info("cells", "MOVING", "tenant", "a/b")},
		"retry that isn't": {codes.NotFound, info("cells", "UNKNOWN_TENANT")},
	} {
		s := status.New(c.code, "x")
		if c.info != nil {
			var err error
			if s, err = s.WithDetails(c.info); err != nil {
				t.Fatal(err)
			}
		}
		if a, ok := cells.AnswerFromStatus(s); ok {
			t.Errorf("%s: taken for %v", name, a)
		}
	}
	twice, err := status.New(codes.Unavailable, "x").WithDetails(info("cells", "MOVING"), info("cells", "MOVING"))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := cells.AnswerFromStatus(twice); ok {
		t.Error("two answers in one status were taken for one")
	}
	if _, ok := cells.AnswerFromStatus(nil); ok {
		t.Error("an answer in nothing")
	}
}
