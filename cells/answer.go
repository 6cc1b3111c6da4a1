// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
)

// Code is one of the closed list of answers that the platform itself gives to a
// client. Over HTTP it travels in a problem document (RFC 9457), over gRPC in a
// google.rpc.ErrorInfo detail.
type Code string

// The closed list. Retry says whether the request may be sent again unchanged:
// for every code with Retry true nothing of it has run.
const (
	CodeUnknownTenant      Code = "UNKNOWN_TENANT"
	CodeInvalidTenant      Code = "INVALID_TENANT"
	CodeWrongCell          Code = "WRONG_CELL"
	CodeStaleRoute         Code = "STALE_ROUTE"
	CodeMoving             Code = "MOVING"
	CodeCellClosed         Code = "CELL_CLOSED"
	CodeCellUnreachable    Code = "CELL_UNREACHABLE"
	CodeNoCell             Code = "NO_CELL"
	CodeBackendUnavailable Code = "BACKEND_UNAVAILABLE"
	CodeUnknownHost        Code = "UNKNOWN_HOST"
	CodeUnknownIssuer      Code = "UNKNOWN_ISSUER"
	CodeTenancyRefused     Code = "TENANCY_REFUSED"
	CodeOverloaded         Code = "OVERLOADED"
	CodeRateLimited        Code = "RATE_LIMITED"
	CodeBackendTimeout     Code = "BACKEND_TIMEOUT"
	CodeAuthUnavailable    Code = "AUTH_UNAVAILABLE"
	CodeBadRequest         Code = "BAD_REQUEST"
	CodeTooLarge           Code = "TOO_LARGE"
	CodeNotServed          Code = "NOT_SERVED"

	// Answers of the control plane to operators and to members.
	CodeNoOperatorCredential Code = "NO_OPERATOR_CREDENTIAL"
	CodeUnauthenticated      Code = "UNAUTHENTICATED"
	CodeForbidden            Code = "FORBIDDEN"
	CodeNotFound             Code = "NOT_FOUND"
	CodeConflict             Code = "CONFLICT"
	CodeBudgetExceeded       Code = "BUDGET_EXCEEDED"
	CodeProbeBusy            Code = "PROBE_BUSY"
	CodeProbeUnreachable     Code = "PROBE_UNREACHABLE"
)

type codeInfo struct {
	http  int
	grpc  codes.Code
	retry bool
	title string
}

var codeTable = map[Code]codeInfo{
	CodeUnknownTenant:      {http.StatusNotFound, codes.NotFound, false, "no cell serves this tenant"},
	CodeInvalidTenant:      {http.StatusBadRequest, codes.InvalidArgument, false, "the tenant id is malformed"},
	CodeWrongCell:          {http.StatusConflict, codes.FailedPrecondition, true, "another cell holds this tenant"},
	CodeStaleRoute:         {http.StatusConflict, codes.Aborted, true, "the request was routed by an older epoch"},
	CodeMoving:             {http.StatusServiceUnavailable, codes.Unavailable, true, "the tenant is moving to another cell"},
	CodeCellClosed:         {http.StatusServiceUnavailable, codes.Unavailable, true, "the cell takes no new tenants"},
	CodeCellUnreachable:    {http.StatusBadGateway, codes.Unavailable, false, "the cell cannot be reached"},
	CodeNoCell:             {http.StatusServiceUnavailable, codes.Unavailable, true, "no cell is registered"},
	CodeBackendUnavailable: {http.StatusServiceUnavailable, codes.Unavailable, true, "the directory or the cell's database cannot be reached"},
	CodeUnknownHost:        {http.StatusMisdirectedRequest, codes.InvalidArgument, false, "this host is not served here"},
	CodeUnknownIssuer:      {http.StatusUnauthorized, codes.Unauthenticated, false, "no cell accepts this issuer"},
	CodeTenancyRefused:     {http.StatusServiceUnavailable, codes.Unavailable, true, "the cell's stores refuse this tenant"},
	CodeOverloaded:         {http.StatusServiceUnavailable, codes.Unavailable, true, "too many requests are waiting"},
	CodeRateLimited:        {http.StatusTooManyRequests, codes.ResourceExhausted, true, "too many requests"},
	CodeBackendTimeout:     {http.StatusGatewayTimeout, codes.DeadlineExceeded, false, "the cell did not answer in time"},
	CodeAuthUnavailable:    {http.StatusServiceUnavailable, codes.Unavailable, true, "authentication cannot be checked now"},
	CodeBadRequest:         {http.StatusBadRequest, codes.InvalidArgument, false, "the request is malformed"},
	CodeTooLarge:           {http.StatusRequestEntityTooLarge, codes.ResourceExhausted, false, "the request is too large"},
	CodeNotServed:          {http.StatusNotFound, codes.Unimplemented, false, "this path is not served here"},

	CodeNoOperatorCredential: {http.StatusServiceUnavailable, codes.Unavailable, true, "no operator credential is configured"},
	CodeUnauthenticated:      {http.StatusUnauthorized, codes.Unauthenticated, false, "the credential is missing or wrong"},
	CodeForbidden:            {http.StatusForbidden, codes.PermissionDenied, false, "this identity may not do that"},
	CodeNotFound:             {http.StatusNotFound, codes.NotFound, false, "there is no such record"},
	CodeConflict:             {http.StatusConflict, codes.FailedPrecondition, false, "the request contradicts what is stored"},
	CodeBudgetExceeded:       {http.StatusConflict, codes.FailedPrecondition, false, "the tenant's unavailability budget does not allow it"},
	CodeProbeBusy:            {http.StatusServiceUnavailable, codes.Unavailable, true, "the cell's probe listener is past its rate"},
	CodeProbeUnreachable:     {http.StatusServiceUnavailable, codes.Unavailable, true, "the cell's probe listener cannot be reached, or cannot read a store"},
}

// Codes returns the closed list, in alphabetical order. The caller owns it.
func Codes() []Code { return slices.Sorted(maps.Keys(codeTable)) }

// HTTPStatus returns the status that the code travels with; 500 for a code
// outside the list.
func (c Code) HTTPStatus() int {
	if i, ok := codeTable[c]; ok {
		return i.http
	}
	return http.StatusInternalServerError
}

// GRPCCode returns the gRPC status code; Internal for a code outside the list.
func (c Code) GRPCCode() codes.Code {
	if i, ok := codeTable[c]; ok {
		return i.grpc
	}
	return codes.Internal
}

// Retry reports whether the same request may be sent again: nothing of it ran.
func (c Code) Retry() bool { return codeTable[c].retry }

// Title is the code's fixed sentence.
func (c Code) Title() string { return codeTable[c].title }

// Known reports whether the code is in the closed list.
func (c Code) Known() bool { _, ok := codeTable[c]; return ok }

// Answer is an error that the platform gives to a client: a code of the closed
// list, with the revision and the age of what was known when it was given.
type Answer struct {
	Code   Code
	Tenant TenantID
	// Cell is the cell that the answer is about, if it may be told.
	Cell CellID
	// Detail says what happened this time and what to do; never a secret.
	Detail string
	// Revision and Age are those of the view that decided.
	Revision Revision
	Age      time.Duration
	// RetryAfter, if positive, is sent as Retry-After, rounded up to a second.
	RetryAfter time.Duration
	// Err is the cause; it is logged, never sent.
	Err error
}

// Error implements error. It names the code, the tenant and the cause.
func (a *Answer) Error() string {
	s := string(a.Code)
	if a.Tenant != "" {
		s += " tenant " + string(a.Tenant)
	}
	if a.Detail != "" {
		s += ": " + a.Detail
	}
	if a.Err != nil {
		s += fmt.Sprintf(" (%v)", a.Err)
	}
	return s
}

// Unwrap returns the cause.
func (a *Answer) Unwrap() error { return a.Err }

// AnswerOf returns the Answer in err's chain, or nil.
func AnswerOf(err error) *Answer {
	var a *Answer
	if errors.As(err, &a) {
		return a
	}
	return nil
}
