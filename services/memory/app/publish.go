// SPDX-License-Identifier: Apache-2.0

package app

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/publish/kafka"
	"github.com/cloister-dev/cloister/guard/publish/nats"
	"github.com/cloister-dev/cloister/guard/publish/webhook"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/services/memory"
)

// publishing says where events go.
type publishing struct {
	target     string // nats://, tls://, kafka://, https:// or http://
	keyFile    string
	caFile     string
	publicOnly bool
}

// publisher is what a relay publishes to, until it is closed.
type publisher interface {
	guard.Publisher
	Close()
}

// relay returns what publishes the store's outbox and what ends it afterwards, or
// no relay when nobody wants the events.
func (p publishing) relay(store *memory.Store, log *slog.Logger) (member.Runner, func(), error) {
	if p.target == "" {
		return nil, func() {}, nil
	}
	pub, err := p.open(log)
	if err != nil {
		return nil, nil, fmt.Errorf("--publish: %w", err)
	}
	r, err := guard.NewRelay(guard.RelayConfig{Store: store.Guard(), Publisher: pub, Logger: log, Timeout: 30 * time.Second})
	if err != nil {
		pub.Close()
		return nil, nil, err
	}
	return r, pub.Close, nil
}

// address is a target in its parts.
type address struct {
	scheme string
	hosts  []string
	name   string // of the stream or topic
	query  url.Values
}

// parseAddress reads scheme://host[,host...][/name][?query]. There is no place for
// a user: secrets are in files.
func parseAddress(s string) (address, error) {
	bad := func(what string) (address, error) { return address{}, fmt.Errorf("%w: %s", cells.ErrInvalid, what) }
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		return bad("want nats://, tls://, kafka:// or https:// and an address")
	}
	rest, query, _ := strings.Cut(rest, "?")
	hosts, name, _ := strings.Cut(rest, "/")
	a := address{scheme: scheme, hosts: strings.Split(hosts, ","), name: name}
	for _, h := range a.hosts {
		if h == "" || strings.ContainsAny(h, "@ #") {
			return bad("want host:port, several parted by commas, and no user (see --publish-key-file)")
		}
	}
	if strings.Contains(name, "/") {
		return bad("want one name after the address")
	}
	var err error
	if a.query, err = url.ParseQuery(query); err != nil {
		return bad("what is behind the question mark cannot be read")
	}
	return a, nil
}

// take removes a setting from the query.
func (a *address) take(name string) string {
	v := a.query.Get(name)
	a.query.Del(name)
	return v
}

// end refuses settings that nobody knows.
func (a *address) end() error {
	for name := range a.query {
		return fmt.Errorf("%w: there is no setting %q of %s://", cells.ErrInvalid, name, a.scheme)
	}
	return nil
}

func (p publishing) open(log *slog.Logger) (publisher, error) {
	if strings.HasPrefix(p.target, "https://") || strings.HasPrefix(p.target, "http://") {
		return p.webhook()
	}
	a, err := parseAddress(p.target)
	if err != nil {
		return nil, err
	}
	if p.publicOnly {
		return nil, fmt.Errorf("%w: --publish-public-only is for webhooks", cells.ErrInvalid)
	}
	switch a.scheme {
	case "nats", "tls":
		return p.nats(a, log)
	case "kafka":
		return p.kafka(a)
	}
	return nil, fmt.Errorf("%w: want nats://, tls://, kafka:// or https://, not %s://", cells.ErrInvalid, a.scheme)
}

func (p publishing) webhook() (publisher, error) {
	if p.caFile != "" {
		return nil, fmt.Errorf("%w: --publish-ca-file is for brokers", cells.ErrInvalid)
	}
	text, err := os.ReadFile(p.keyFile)
	if err != nil {
		return nil, fmt.Errorf("a webhook needs --publish-key-file: %w", err)
	}
	keys, err := webhook.ParseKeys(string(text))
	if err != nil {
		return nil, err
	}
	return webhook.New(webhook.Config{URL: p.target, Keys: keys, PublicOnly: p.publicOnly})
}

func (p publishing) nats(a address, log *slog.Logger) (publisher, error) {
	cfg := nats.Config{Stream: a.name, Prefix: a.take("prefix"), Logger: log}
	var err error
	if v := a.take("create"); v != "" {
		if cfg.Create, err = strconv.ParseBool(v); err != nil {
			return nil, fmt.Errorf("%w: create is true or false", cells.ErrInvalid)
		}
	}
	if v := a.take("replicas"); v != "" {
		if cfg.Replicas, err = strconv.Atoi(v); err != nil {
			return nil, fmt.Errorf("%w: replicas is a number", cells.ErrInvalid)
		}
	}
	if v := a.take("max-age"); v != "" {
		if cfg.MaxAge, err = time.ParseDuration(v); err != nil {
			return nil, fmt.Errorf("%w: max-age is a duration", cells.ErrInvalid)
		}
	}
	if err := a.end(); err != nil {
		return nil, err
	}
	for i, h := range a.hosts {
		a.hosts[i] = a.scheme + "://" + h
	}
	cfg.URL = strings.Join(a.hosts, ",")
	if p.keyFile != "" {
		if _, err := os.Stat(p.keyFile); err != nil {
			return nil, err
		}
		cfg.Options = append(cfg.Options, natsgo.UserCredentials(p.keyFile))
	}
	if p.caFile != "" {
		cfg.Options = append(cfg.Options, natsgo.RootCAs(p.caFile))
	}
	return nats.New(cfg)
}

func (p publishing) kafka(a address) (publisher, error) {
	cfg := kafka.Config{Brokers: a.hosts, Topic: a.name}
	secure := p.caFile != ""
	if v := a.take("tls"); v != "" {
		var err error
		if secure, err = strconv.ParseBool(v); err != nil {
			return nil, fmt.Errorf("%w: tls is true or false", cells.ErrInvalid)
		}
	}
	if err := a.end(); err != nil {
		return nil, err
	}
	if secure {
		tc := &tls.Config{MinVersion: tls.VersionTLS12}
		if p.caFile != "" {
			pem, err := os.ReadFile(p.caFile)
			if err != nil {
				return nil, err
			}
			tc.RootCAs = x509.NewCertPool()
			if !tc.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("%w: no certificate in %s", cells.ErrInvalid, p.caFile)
			}
		}
		cfg.Options = append(cfg.Options, kgo.DialTLSConfig(tc))
	}
	if p.keyFile != "" {
		text, err := os.ReadFile(p.keyFile)
		if err != nil {
			return nil, err
		}
		user, pass, ok := strings.Cut(strings.TrimSpace(string(text)), "\n")
		if user, pass = strings.TrimSpace(user), strings.TrimSpace(pass); !ok || user == "" || pass == "" {
			return nil, errors.New("the key file of Kafka has a user in its first line and a password in its second")
		}
		cfg.Options = append(cfg.Options, kgo.SASL(scram.Auth{User: user, Pass: pass}.AsSha512Mechanism()))
	}
	return kafka.New(cfg)
}
