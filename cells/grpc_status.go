// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"encoding/base64"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
)

// ErrorDomain is the domain of the google.rpc.ErrorInfo of an answer.
const ErrorDomain = "cells"

// AnswerStatus returns the answer as a gRPC status: its code, a message, an
// ErrorInfo with the answer's code as reason and metadata "retry", "revision",
// "age_ms" and "tenant", and a RetryInfo if there is something to wait for. An
// answer outside the closed list becomes a plain Internal status.
func AnswerStatus(a *Answer) *status.Status { return answerStatus(a, a.Code.Retry()) }

func answerStatus(a *Answer, retry bool) *status.Status {
	message := a.Code.Title()
	if a.Detail != "" {
		message += ": " + clip(a.Detail, maxDetail)
	}
	if !a.Code.Known() {
		return status.New(codes.Internal, "an answer outside the closed list")
	}
	info := &errdetails.ErrorInfo{Reason: string(a.Code), Domain: ErrorDomain, Metadata: map[string]string{
		"retry":    strconv.FormatBool(retry),
		"revision": strconv.FormatUint(uint64(a.Revision), 10),
		"age_ms":   strconv.FormatInt(ageMS(a.Age), 10),
	}}
	if a.Tenant != "" && a.Tenant.Validate() == nil {
		info.Metadata["tenant"] = string(a.Tenant)
	}
	p := &statuspb.Status{Code: int32(a.Code.GRPCCode()), Message: message}
	details := []proto.Message{info}
	if a.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(a.RetryAfter)})
	}
	for _, d := range details {
		packed, err := anypb.New(d)
		if err != nil {
			return status.New(codes.Internal, "an answer could not be encoded")
		}
		p.Details = append(p.Details, packed)
	}
	return status.FromProto(p)
}

// AnswerFromStatus returns the answer of [AnswerStatus]; ok is false when s is
// nothing of the platform's. An answer that ended a stream which had begun (its
// "retry" is "false" although its code may be retried) is returned with
// [ErrGateClosed] as its Err.
func AnswerFromStatus(s *status.Status) (a *Answer, ok bool) {
	if s == nil {
		return nil, false
	}
	return answerFromDetails(s)
}

func answerFromDetails(s *status.Status) (*Answer, bool) {
	var a *Answer
	for _, d := range s.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() != ErrorDomain {
				continue
			}
			code := Code(d.GetReason())
			if a != nil || !code.Known() || s.Code() != code.GRPCCode() {
				return nil, false
			}
			a = &Answer{Code: code}
			m := d.GetMetadata()
			rev, err := strconv.ParseUint(m["revision"], 10, 64)
			if err != nil {
				return nil, false
			}
			age, err := strconv.ParseInt(m["age_ms"], 10, 64)
			if err != nil || age < 0 || age > math.MaxInt64/int64(time.Millisecond) {
				return nil, false
			}
			a.Revision, a.Age = Revision(rev), time.Duration(age)*time.Millisecond
			if t := TenantID(m["tenant"]); t != "" {
				if t.Validate() != nil {
					return nil, false
				}
				a.Tenant = t
			}
			if retry := m["retry"]; retry != strconv.FormatBool(code.Retry()) {
				if retry != "false" {
					return nil, false
				}
				a.Err = ErrGateClosed
			}
		}
	}
	if a == nil {
		return nil, false
	}
	for _, d := range s.Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok && r.GetRetryDelay().IsValid() {
			a.RetryAfter = max(0, r.GetRetryDelay().AsDuration())
		}
	}
	if detail, ok := strings.CutPrefix(s.Message(), a.Code.Title()+": "); ok {
		a.Detail = clip(detail, maxDetail)
	}
	return a, true
}

// withoutAnswer returns s without what would make it look like an answer of the
// platform. changed is false when there was nothing of it.
func withoutAnswer(s *status.Status) (_ *status.Status, changed bool) {
	p := s.Proto()
	var kept []*anypb.Any
	for _, d := range p.GetDetails() {
		var info errdetails.ErrorInfo
		if d.MessageIs(&info) && (d.UnmarshalTo(&info) != nil || info.GetDomain() == ErrorDomain) {
			changed = true
			continue
		}
		kept = append(kept, d)
	}
	if !changed {
		return s, false
	}
	p.Details = kept
	return status.FromProto(p), true
}

func statusFromBytes(b []byte) (*status.Status, error) {
	var p statuspb.Status
	if err := proto.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("%w: status details: %w", ErrInvalid, err)
	}
	return status.FromProto(&p), nil
}

// encodeBin and decodeBin are the encoding of binary headers in gRPC.
func encodeBin(b []byte) string { return base64.RawStdEncoding.EncodeToString(b) }

func decodeBin(s string) ([]byte, error) {
	if len(s) > 2*maxProblem {
		return nil, fmt.Errorf("%w: status details of %d bytes", ErrInvalid, len(s))
	}
	return base64.RawStdEncoding.DecodeString(strings.TrimRight(s, "="))
}

// encodeGRPCMessage percent-encodes what a grpc-message may not hold as it is.
func encodeGRPCMessage(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}
