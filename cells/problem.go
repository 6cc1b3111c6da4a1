// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Header names. Over gRPC the same names are used as metadata, in lower case.
// Clients never decide them: an edge removes every Cell-* header that it was sent.
const (
	// HeaderTenant, HeaderEpoch and HeaderAdmission are set by the edge on what it
	// forwards: the tenant, the epoch of the route, and the token of [MintToken].
	HeaderTenant    = "Cell-Tenant"
	HeaderEpoch     = "Cell-Epoch"
	HeaderAdmission = "Cell-Admission"
	// HeaderCell is set on answers: the cell that answered. HeaderEpoch is set on
	// answers too: the epoch that the request was admitted at.
	HeaderCell = "Cell-Cell"
	// HeaderAnswer is the code of an answer that the platform itself gives. A
	// service's own answers never carry it.
	HeaderAnswer = "Cell-Answer"
	// HeaderStreamEnd is a trailer of an HTTP response that was still being written when
	// the tenant's gate closed, with the code of the answer that ended it: what came
	// before it may be part of a whole. A service's own responses never carry it.
	HeaderStreamEnd = "Cell-Stream-End"
	// HeaderRevision and HeaderAge (milliseconds) tell what an answer of the
	// platform was decided by.
	HeaderRevision = "Cell-Revision"
	HeaderAge      = "Cell-Age"
)

// ProblemType is the media type of an answer's body over HTTP (RFC 9457).
const ProblemType = "application/problem+json"

// problemPrefix begins the type of a problem; the code in lower case follows.
const problemPrefix = "urn:cells:problem:"

const (
	maxProblem = 64 << 10
	maxDetail  = 2048
)

// problem is the document that an answer travels in.
type problem struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Detail   string   `json:"detail,omitempty"`
	Instance string   `json:"instance,omitempty"`
	Code     Code     `json:"code"`
	Retry    bool     `json:"retry"`
	Tenant   TenantID `json:"tenant,omitempty"`
	Revision Revision `json:"revision"`
	AgeMS    int64    `json:"age_ms"`
}

// WriteProblem writes the answer as the whole response to r: a problem document, or
// over gRPC (by r's content type) a response that is only trailers. An answer with
// a code outside the closed list is written as 500 without Cell-Answer. A handler
// below [HTTPMiddleware] may use it to refuse what it has not begun; then the
// answer counts as the platform's.
func WriteProblem(w http.ResponseWriter, r *http.Request, a *Answer) {
	h := w.Header()
	for _, name := range []string{"Content-Length", "Content-Encoding", "Etag", "Last-Modified", "Cache-Control", "Trailer"} {
		h.Del(name)
	}
	if a.Code.Known() {
		allowAnswer(w, a.Code)
		h.Set(HeaderAnswer, string(a.Code))
		h.Set(HeaderRevision, strconv.FormatUint(uint64(a.Revision), 10))
		h.Set(HeaderAge, strconv.FormatInt(ageMS(a.Age), 10))
	}
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	if isGRPC(r.Header.Get("Content-Type")) && r.ProtoMajor == 2 {
		writeGRPCProblem(w, a)
		return
	}
	if s := retrySeconds(a); s != "" {
		h.Set("Retry-After", s)
	}
	p := problem{
		Type: problemPrefix + strings.ToLower(string(a.Code)), Title: a.Code.Title(), Status: a.Code.HTTPStatus(),
		Detail: clip(strings.ReplaceAll(a.Detail, ErrInvalid.Error()+": ", ""), maxDetail), Code: a.Code, Retry: a.Code.Retry(), Tenant: a.Tenant,
		Revision: a.Revision, AgeMS: ageMS(a.Age),
	}
	if p.Tenant.Validate() != nil {
		p.Tenant = "" // whatever it is, it goes into no document
	}
	if r.URL != nil {
		p.Instance = clip((&url.URL{Path: r.URL.Path}).EscapedPath(), maxDetail)
	}
	body, err := json.Marshal(p)
	if err != nil { // strings and numbers always marshal
		body = []byte("{}")
	}
	h.Set("Content-Type", ProblemType)
	h.Set("Content-Length", strconv.Itoa(len(body)+1))
	w.WriteHeader(p.Status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(append(body, '\n'))
	}
}

// writeGRPCProblem writes a response without a body: the trailers are its headers.
func writeGRPCProblem(w http.ResponseWriter, a *Answer) {
	h := w.Header()
	s := AnswerStatus(a)
	h.Set("Content-Type", "application/grpc")
	h.Set("Grpc-Status", strconv.Itoa(int(s.Code())))
	h.Set("Grpc-Message", encodeGRPCMessage(s.Message()))
	if b, err := proto.Marshal(s.Proto()); err == nil {
		h.Set("Grpc-Status-Details-Bin", encodeBin(b))
	}
	w.WriteHeader(http.StatusOK)
}

// ReadProblem returns the answer that a response carries if the platform gave it:
// exactly one Cell-Answer with a code of the closed list, and a status and a
// document (of at most 64 KiB) that agree with it; over gRPC, a response that is
// only trailers. Anything else is a service's own answer. The body can still be
// read from its start afterwards.
func ReadProblem(resp *http.Response) (*Answer, bool) {
	given := resp.Header.Values(HeaderAnswer)
	if len(given) != 1 {
		return nil, false
	}
	code := Code(given[0])
	if !code.Known() {
		return nil, false
	}
	a := &Answer{Code: code}
	if v := resp.Header.Get(HeaderRevision); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			return nil, false
		}
		a.Revision = Revision(n)
	}
	if v := resp.Header.Get(HeaderAge); v != "" {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < 0 || n > math.MaxInt64/int64(time.Millisecond) {
			return nil, false
		}
		a.Age = time.Duration(n) * time.Millisecond
	}
	if isGRPC(resp.Header.Get("Content-Type")) {
		return readGRPCProblem(resp, a)
	}
	if v := resp.Header.Get("Retry-After"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || n > 86400 {
			return nil, false
		}
		a.RetryAfter = time.Duration(n) * time.Second
	}
	if t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || t != ProblemType {
		return nil, false
	}
	if resp.StatusCode != code.HTTPStatus() {
		return nil, false
	}
	if resp.Request != nil && resp.Request.Method == http.MethodHead {
		return a, true
	}
	if resp.Body == nil {
		return nil, false
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem+1))
	resp.Body = &replayBody{Reader: io.MultiReader(bytes.NewReader(body), errReader{err}, resp.Body), Closer: resp.Body}
	if err != nil || len(body) > maxProblem || !utf8.Valid(body) {
		return nil, false
	}
	var p problem
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if dec.Decode(&p) != nil || !errors.Is(dec.Decode(new(struct{})), io.EOF) {
		return nil, false
	}
	if p.Code != code || p.Status != resp.StatusCode || p.Retry != code.Retry() || p.Type != problemPrefix+strings.ToLower(string(code)) ||
		p.Revision != a.Revision || p.AgeMS != ageMS(a.Age) || p.Tenant != "" && p.Tenant.Validate() != nil {
		return nil, false
	}
	a.Tenant, a.Detail = p.Tenant, p.Detail
	if c := CellID(resp.Header.Get(HeaderCell)); c.Validate() == nil {
		a.Cell = c
	}
	return a, true
}

func readGRPCProblem(resp *http.Response, a *Answer) (*Answer, bool) {
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Grpc-Status") != strconv.Itoa(int(a.Code.GRPCCode())) {
		return nil, false
	}
	raw, err := decodeBin(resp.Header.Get("Grpc-Status-Details-Bin"))
	if err != nil || len(raw) > maxProblem {
		return nil, false
	}
	s, err := statusFromBytes(raw)
	if err != nil {
		return nil, false
	}
	got := answerFrom(s)
	if got == nil || got.Code != a.Code || got.Revision != a.Revision || ageMS(got.Age) != ageMS(a.Age) {
		return nil, false
	}
	return got, true
}

// answerFrom returns the answer in a status, or nil.
func answerFrom(s *status.Status) *Answer {
	if a, ok := answerFromDetails(s); ok {
		return a
	}
	return nil
}

type replayBody struct {
	io.Reader
	io.Closer
}

// errReader passes on an error that reading has met; without one it is empty.
type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) {
	if e.err != nil {
		return 0, e.err
	}
	return 0, io.EOF
}

func ageMS(d time.Duration) int64 { return max(0, d.Milliseconds()) }

// retrySeconds is the value of Retry-After, or "".
func retrySeconds(a *Answer) string {
	if a.RetryAfter <= 0 {
		return ""
	}
	return strconv.FormatInt(int64((a.RetryAfter+time.Second-1)/time.Second), 10)
}

// clip makes s valid UTF-8 of at most n bytes.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

func isGRPC(contentType string) bool {
	return contentType == "application/grpc" || strings.HasPrefix(contentType, "application/grpc+") || strings.HasPrefix(contentType, "application/grpc;")
}
