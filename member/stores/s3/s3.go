// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/internal/names"
)

const (
	nameDeployment = stores.Reserved + "deployment"
	nameNonce      = stores.Reserved + "probe"
	nameMark       = stores.Reserved + "isolation/"
	maxValue       = 256
)

// Config says which prefix of which bucket, and how it is reached.
type Config struct {
	// Endpoint is the server: http or https, a host and perhaps a port.
	Endpoint string
	// Region of the bucket; default "us-east-1".
	Region string
	// Location is the bucket, which exists, and the prefix.
	Location stores.Location
	// AccessKey and SecretKey sign the requests. Without them the AWS_ variables, the
	// AWS credentials file and the machine's role are looked at, in this order.
	AccessKey, SecretKey string
	// RootCAs sign the server's certificate; nil is the system's.
	RootCAs *x509.CertPool
}

// Store is a bucket's prefix. It is safe for concurrent use.
type Store struct {
	common
	core minio.Core
	at   stores.Location
	idle func()
}

// common are the methods that are the same for every store with reserved names.
type common = names.Names

var _ stores.Store = (*Store)(nil)

// Open checks that the bucket can be reached. The caller closes the store.
//
// [cells.ErrInvalid] for a malformed configuration, a bucket that is not there and a
// credential that may not; [cells.ErrUnavailable] when the server cannot be reached.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.Location.IsZero() {
		return nil, fmt.Errorf("%w: the bucket has no name", cells.ErrInvalid)
	}
	if err := cfg.Location.Validate(); err != nil {
		return nil, err
	}
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("%w: the bucket's endpoint is http:// or https:// and a host, without a user or a path", cells.ErrInvalid) // it may have a secret in it
	}
	if (cfg.AccessKey == "") != (cfg.SecretKey == "") {
		return nil, fmt.Errorf("%w: of the bucket's access key and secret key one is missing", cells.ErrInvalid)
	}
	if cfg.Region == "" {
		cfg.Region = "us-east-1"
	}
	creds := credentials.NewStaticV4(cfg.AccessKey, cfg.SecretKey, "")
	if cfg.AccessKey == "" {
		creds = credentials.NewChainCredentials([]credentials.Provider{&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{}})
	}
	tr := &http.Transport{DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext, TLSHandshakeTimeout: 5 * time.Second, ResponseHeaderTimeout: 30 * time.Second,
		MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second, TLSClientConfig: &tls.Config{RootCAs: cfg.RootCAs, MinVersion: tls.VersionTLS12}, DisableCompression: true}
	c, err := minio.New(u.Host, &minio.Options{Creds: creds, Secure: u.Scheme == "https", Region: cfg.Region, Transport: tr, MaxRetries: 3})
	if err != nil {
		return nil, fmt.Errorf("%w: the bucket's endpoint: %w", cells.ErrInvalid, err)
	}
	s := &Store{core: minio.Core{Client: c}, at: cfg.Location, idle: tr.CloseIdleConnections}
	s.common = common{Nonce: nameNonce, Mark: nameMark, Get: s.find, Put: s.replace, Drop: s.drop}
	there, err := c.BucketExists(ctx, s.at.Bucket)
	if err == nil && !there {
		err = fmt.Errorf("%w: there is no bucket %s", cells.ErrInvalid, s.at.Bucket)
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("member/stores/s3: %w", translate(ctx, err))
	}
	return s, nil
}

// Close closes the connections that are idle.
func (s *Store) Close() { s.idle() }

// Kind implements [stores.Store].
func (s *Store) Kind() stores.Kind { return stores.S3 }

// Location implements [stores.Store].
func (s *Store) Location() stores.Location { return s.at }

// Identity implements [stores.Store].
func (s *Store) Identity(ctx context.Context) (stores.Identity, error) {
	v, err := s.get(ctx, nameDeployment)
	id := stores.DeploymentID(v)
	if err == nil && v != "" {
		err = id.Validate()
	}
	if err != nil {
		return stores.Identity{}, err
	}
	return stores.Identity{Kind: stores.S3, Deployment: id, Location: s.at}, nil
}

// Establish implements [stores.Store].
func (s *Store) Establish(ctx context.Context, id stores.DeploymentID) (stores.DeploymentID, error) {
	if err := id.Validate(); err != nil {
		return "", err
	}
	for range 5 {
		got, err := s.Identity(ctx)
		if err != nil || got.Deployment != "" {
			return got.Deployment, err
		}
		err = s.put(ctx, nameDeployment, string(id), true)
		switch minio.ToErrorResponse(err).Code {
		case "NotImplemented":
			err = s.put(ctx, nameDeployment, string(id), false)
		case "PreconditionFailed", "ConditionalRequestConflict": // another was first, or is being it
			err = nil
		}
		if err != nil {
			return "", translate(ctx, err)
		}
	}
	return "", fmt.Errorf("%w: the deployment id was written and is gone", cells.ErrUnavailable)
}

// Visible implements [stores.Store]. It lists everything below the prefix: a cell
// inside has its marks below a prefix that nobody here knows.
func (s *Store) Visible(ctx context.Context, m stores.Mark) (bool, error) {
	if err := m.Validate(); err != nil {
		return false, err
	}
	own := s.at.Key(nameMark + string(m))
	if _, err := s.core.Client.StatObject(ctx, s.at.Bucket, own, fresh()); err == nil {
		return true, nil
	} else if !missing(err) {
		return false, translate(ctx, err)
	}
	found := false
	err := s.each(ctx, s.at.Key(""), func(o minio.ObjectInfo) bool {
		found = o.Key == own || strings.HasSuffix(o.Key, "/"+nameMark+string(m))
		return !found
	})
	return found, err
}

// Empty implements [stores.Store]: there is no object below the prefix but this
// package's own and the folder's own marker.
func (s *Store) Empty(ctx context.Context) (empty bool, holds string, err error) {
	err = s.each(ctx, s.at.Key(""), func(o minio.ObjectInfo) bool {
		if !s.own(o) {
			holds = fmt.Sprintf("object %.200q", o.Key)
		}
		return holds == ""
	})
	return err == nil && holds == "", holds, err
}

// own reports whether an object is what this package keeps here.
func (s *Store) own(o minio.ObjectInfo) bool {
	name := strings.TrimPrefix(o.Key, s.at.Key(""))
	switch name {
	case nameDeployment, nameNonce:
		return true
	case "", nameMark: // what consoles make for a folder
		return o.Size == 0
	}
	mark, is := strings.CutPrefix(name, nameMark)
	return is && stores.Mark(mark).Validate() == nil
}

// each calls fn for every object below a prefix until it returns false.
func (s *Store) each(ctx context.Context, prefix string, fn func(minio.ObjectInfo) bool) error {
	inner, stop := context.WithCancel(ctx)
	defer stop()
	for o := range s.core.Client.ListObjectsIter(inner, s.at.Bucket, minio.ListObjectsOptions{Prefix: prefix, Recursive: true}) {
		if o.Err != nil {
			return translate(ctx, o.Err)
		}
		if !fn(o) {
			return nil
		}
	}
	if ctx.Err() != nil { // a listing that was cut short is no listing
		return translate(ctx, ctx.Err())
	}
	return nil
}

// fresh asks what stands in between not to answer from memory.
func fresh() minio.GetObjectOptions {
	var o minio.GetObjectOptions
	o.Set("Cache-Control", "no-cache")
	return o
}

// get returns a reserved value, "" when there is none.
// find is get for [names.Names].
func (s *Store) find(ctx context.Context, name string) (string, bool, error) {
	v, err := s.get(ctx, name)
	return v, v != "", err
}

func (s *Store) get(ctx context.Context, name string) (string, error) {
	body, _, _, err := s.core.GetObject(ctx, s.at.Bucket, s.at.Key(name), fresh())
	if missing(err) {
		return "", nil
	}
	if err != nil {
		return "", translate(ctx, err)
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, maxValue))
	if err != nil {
		if missing(err) {
			return "", nil
		}
		return "", translate(ctx, err)
	}
	if len(b) == 0 {
		return "", fmt.Errorf("%w: the reserved object %s is empty", cells.ErrInvalid, name)
	}
	return string(b), nil
}

func (s *Store) put(ctx context.Context, name, value string, ifNone bool) error {
	o := minio.PutObjectOptions{ContentType: "text/plain", CacheControl: "no-store", DisableMultipart: true}
	if ifNone {
		o.SetMatchETagExcept("*")
	}
	_, err := s.core.Client.PutObject(ctx, s.at.Bucket, s.at.Key(name), strings.NewReader(value), int64(len(value)), o)
	return err
}

// replace is put for [names.Names].
func (s *Store) replace(ctx context.Context, name, value string) error {
	return translate(ctx, s.put(ctx, name, value, false))
}

func (s *Store) drop(ctx context.Context, name string) error {
	err := s.core.Client.RemoveObject(ctx, s.at.Bucket, s.at.Key(name), minio.RemoveObjectOptions{})
	if missing(err) {
		return nil
	}
	return translate(ctx, err)
}

func missing(err error) bool {
	return err != nil && minio.ToErrorResponse(err).Code == "NoSuchKey"
}

// translate turns the client's error into one of package cells.
func translate(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, cells.ErrInvalid) || errors.Is(err, cells.ErrUnavailable) {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, context.Cause(ctx))
	}
	var er minio.ErrorResponse
	if !errors.As(err, &er) || er.StatusCode >= 500 || er.StatusCode == http.StatusTooManyRequests || er.Code == "SlowDown" || er.Code == "RequestTimeout" {
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %s (%s)", cells.ErrInvalid, er.Message, er.Code)
}
