// Package policy_test tests the ValidatingAdmissionPolicy in contrib/kubernetes, and
// the examples, with the API server's own admission plugin.
package policy_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/cel/environment"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/ocihold/ocihold/imagevolume/request"
)

const (
	contrib    = "../../contrib"
	policyFile = contrib + "/kubernetes/annotations.yaml"
	volumes    = request.Domain
	exec       = request.NativeExecDomain
	handler    = "runtime-handler.ocihold.dev"
	oneImage   = "- image: reg.example/models/llama:7b\n  mountPath: /models\n"
)

// objects reads the objects of a YAML file. A field that their kind does not have is
// an error.
func objects(t *testing.T, file string) []runtime.Object {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var all []runtime.Object
	for reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content))); ; {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		object, _, err := decoder.Decode(document, nil, nil)
		require.NoError(t, err, file)
		all = append(all, object)
	}
}

// server is the part of an API server that admits.
type server struct {
	plugin *validating.Plugin
	mapper meta.RESTMapper
}

// serve has the policy in force.
func serve(t *testing.T) server {
	t.Helper()
	existing := append(objects(t, policyFile),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
	for _, object := range existing {
		if policy, ok := object.(*admissionv1.ValidatingAdmissionPolicy); ok { // what an API server sets
			policy.Spec.MatchConstraints.NamespaceSelector = &metav1.LabelSelector{}
			policy.Spec.MatchConstraints.ObjectSelector = &metav1.LabelSelector{}
		}
	}
	client := fake.NewSimpleClientset(existing...)
	factory := informers.NewSharedInformerFactory(client, 0)
	s := server{plugin: validating.NewPlugin(nil), mapper: testrestmapper.TestOnlyStaticRESTMapper(scheme.Scheme)}
	s.plugin.SetExternalKubeClientSet(client)
	s.plugin.SetExternalKubeInformerFactory(factory)
	s.plugin.SetDynamicClient(dynamicfake.NewSimpleDynamicClient(scheme.Scheme))
	s.plugin.SetRESTMapper(s.mapper)
	s.plugin.SetAuthorizer(authorizerfactory.NewAlwaysAllowAuthorizer())
	s.plugin.SetDrainedNotification(t.Context().Done())
	require.NoError(t, s.plugin.ValidateInitialization())
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	require.Eventually(t, func() bool {
		return s.create(t.Context(), pod(map[string]string{volumes: ""})) != nil
	}, 30*time.Second, 10*time.Millisecond, "the policy is in force")
	return s
}

func (s server) create(ctx context.Context, object runtime.Object) error {
	return s.admit(ctx, object, nil, admission.Create)
}

func (s server) admit(ctx context.Context, object, old runtime.Object, operation admission.Operation) error {
	kinds, _, err := scheme.Scheme.ObjectKinds(object)
	if err != nil {
		return err
	}
	mapping, err := s.mapper.RESTMapping(kinds[0].GroupKind(), kinds[0].Version)
	if err != nil {
		return err
	}
	attributes := admission.NewAttributesRecord(object, old, kinds[0], "shop", "web", mapping.Resource, "", operation, nil, false, nil)
	return s.plugin.Validate(ctx, attributes, admission.NewObjectInterfacesFromScheme(scheme.Scheme))
}

// template is a pod's that has the containers server, setup and, as debuggers are,
// debug.
func template(annotations map[string]string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Annotations: annotations},
		Spec: corev1.PodSpec{
			Containers:          []corev1.Container{{Name: "server"}},
			InitContainers:      []corev1.Container{{Name: "setup"}},
			EphemeralContainers: []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug"}}},
		},
	}
}

func pod(annotations map[string]string) *corev1.Pod {
	t := template(annotations)
	return &corev1.Pod{ObjectMeta: t.ObjectMeta, Spec: t.Spec}
}

func deployment(annotations map[string]string) *appsv1.Deployment {
	return &appsv1.Deployment{Spec: appsv1.DeploymentSpec{Template: template(annotations)}}
}

func TestPolicy(t *testing.T) {
	s := serve(t)
	const list = `: is not a list of volumes; write "- image: NAME" with "mountPath: /PATH", or [] for no volume`
	const lost = ": the pod has no container of this name; it has server, setup, debug"
	const unknown = ": unknown key; known are"
	for name, tc := range map[string]struct {
		annotations map[string]string
		faults      []string // none where the pod may be made
	}{
		"none":             {},
		"of others":        {map[string]string{"example.com/image-volume": "x", "container.seccomp/ocihold": "x"}, nil},
		"bare":             {map[string]string{volumes: oneImage}, nil},
		"pod":              {map[string]string{volumes + "/pod": oneImage}, nil},
		"container":        {map[string]string{volumes + "/container.server": oneImage}, nil},
		"init container":   {map[string]string{volumes + "/container.setup": oneImage}, nil},
		"debug container":  {map[string]string{volumes + "/container.debug": oneImage}, nil},
		"native":           {map[string]string{exec: "true", exec + "/pod": "false", exec + "/container.server": "true"}, nil},
		"handler":          {map[string]string{handler: "vm"}, nil},
		"no volumes":       {map[string]string{volumes: "[]", volumes + "/pod": "# none\n[ ]\n"}, nil},
		"all keys":         {map[string]string{volumes: "---\n# model\n-  image: a\n   mountPath: /a\n   pullPolicy: IfNotPresent\n   readOnly: true\n   exec: false # or true: it runs\n"}, nil},
		"list indented":    {map[string]string{volumes: "  - mountPath: /a\n    \"image\": 'reg:5000/a:1'\n"}, nil},
		"key after a dash": {map[string]string{volumes: "-\n  image: a\n  mountPath: /a\n"}, nil},
		"JSON":             {map[string]string{volumes: `[{"image": "reg:5000/a:1", "mountPath": "/a", "pullPolicy":"Never"},{"image":"b","mountPath":"/b"}]`}, nil},
		"braces":           {map[string]string{volumes: "[{image: a, mountPath: /a, pullPolicy: Always},\n {exec: true, image: b, mountPath: /b}]"}, nil},

		"lost container":     {map[string]string{volumes + "/container.sever": oneImage}, []string{volumes + "/container.sever" + lost}},
		"lost native":        {map[string]string{exec + "/container.sever": "true"}, []string{exec + "/container.sever" + lost}},
		"name in capitals":   {map[string]string{volumes + "/container.Server": oneImage}, []string{volumes + "/container.Server" + lost}},
		"other key":          {map[string]string{volumes + "/contaner.server": oneImage}, []string{volumes + "/contaner.server" + unknown}},
		"no name":            {map[string]string{volumes + "/container.": oneImage}, []string{volumes + "/container." + unknown}},
		"no dot":             {map[string]string{volumes + "/container": oneImage}, []string{volumes + "/container" + unknown}},
		"another domain":     {map[string]string{"image-volumes.ocihold.dev/pod": oneImage}, []string{"image-volumes.ocihold.dev/pod" + unknown}},
		"another end":        {map[string]string{"image-volume.ocihold.io": oneImage}, []string{"image-volume.ocihold.io" + unknown}},
		"turned round":       {map[string]string{"ocihold.dev/image-volume": oneImage}, []string{"ocihold.dev/image-volume" + unknown}},
		"a report":           {map[string]string{"ocihold.dev/volumes": "[]"}, []string{"ocihold.dev/volumes" + unknown}},
		"container first":    {map[string]string{"container.server.image-volume.ocihold.dev": oneImage}, []string{"container.server.image-volume.ocihold.dev" + unknown}},
		"handler per pod":    {map[string]string{handler + "/pod": "vm"}, []string{handler + "/pod" + unknown}},
		"empty":              {map[string]string{volumes: ""}, []string{volumes + list}},
		"one without a list": {map[string]string{volumes: "image: a\nmountPath: /a\n"}, []string{volumes + list}},
		"JSON object":        {map[string]string{volumes: `{"image": "a", "mountPath": "/a"}`}, []string{volumes + list}},
		"a name":             {map[string]string{volumes: "reg.example/models/llama:7b"}, []string{volumes + list, volumes + ": a volume needs image and mountPath"}},
		"no path":            {map[string]string{volumes: "- image: a\n"}, []string{volumes + ": a volume needs image and mountPath"}},
		"unknown field":      {map[string]string{volumes: "- image: a\n  mountpath: /a\n  # mountPath: /a\n"}, []string{volumes + ": a volume has no key mountpath"}},
		"unknown in JSON":    {map[string]string{volumes: `[{"image":"a","mountPath":"/a","readonly":true}]`}, []string{volumes + ": a volume has no key readonly"}},
		"unknown in braces":  {map[string]string{volumes: "- {path: /mountPath, image: a}"}, []string{volumes + ": a volume has no key path"}},
		"pull policy":        {map[string]string{volumes: oneImage + "  pullPolicy: ifNotPresent\n"}, []string{volumes + ": ifNotPresent is not a pull policy; known are Always, IfNotPresent and Never"}},
		"pull policy, JSON":  {map[string]string{volumes: `[{"image":"a","mountPath":"/a","pullPolicy": "never"}]`}, []string{volumes + ": never is not a pull policy"}},
		"native value":       {map[string]string{exec: "yes"}, []string{exec + `: is neither "true" nor "false"`}},
		"empty handler":      {map[string]string{handler: ""}, []string{handler + ": is empty; write the name of a handler"}},
		"several": {
			map[string]string{volumes + "/container.sever": "", exec: ""},
			[]string{volumes + "/container.sever" + lost, volumes + "/container.sever" + list, exec + ": is neither"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, object := range []runtime.Object{pod(tc.annotations), deployment(tc.annotations)} {
				err := s.create(t.Context(), object)
				if len(tc.faults) == 0 {
					require.NoError(t, err)
					continue
				}
				require.Error(t, err)
				for _, fault := range tc.faults {
					assert.ErrorContains(t, err, "annotation "+fault)
				}
			}
			// What the policy lets through here is right on the node.
			for key := range tc.annotations {
				if !request.Ours(key) || len(tc.faults) > 0 {
					continue
				}
				_, err := request.ForContainer(request.Pod{Namespace: "shop", Name: "web"}, tc.annotations, "server")
				assert.NoError(t, err)
			}
		})
	}
}

// The expressions are those of the first Kubernetes that has such policies without a
// gate: a server takes no new ones with what has come since.
func TestPolicyCompilesOnOldServers(t *testing.T) {
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(version.MajorMinor(1, 30), true))
	require.NoError(t, err)
	policy, ok := objects(t, policyFile)[0].(*admissionv1.ValidatingAdmissionPolicy)
	require.True(t, ok)
	options := cel.OptionalVariableDeclarations{StrictCost: true}
	check := func(name string, result cel.CompilationResult) {
		if result.Error != nil {
			assert.Fail(t, result.Error.Detail, name)
		}
	}
	for _, c := range policy.Spec.MatchConditions {
		check(c.Name, compiler.CompileCELExpression(&matchconditions.MatchCondition{Name: c.Name, Expression: c.Expression}, options, environment.NewExpressions))
	}
	for _, v := range policy.Spec.Variables {
		check(v.Name, compiler.CompileAndStoreVariable(&validating.Variable{Name: v.Name, Expression: v.Expression}, options, environment.NewExpressions))
	}
	for _, v := range policy.Spec.Validations {
		check(v.Expression, compiler.CompileCELExpression(&validating.ValidationCondition{Expression: v.Expression}, options, environment.NewExpressions))
		check(v.MessageExpression,
			compiler.CompileCELExpression(&validating.MessageExpressionCondition{MessageExpression: v.MessageExpression}, options, environment.NewExpressions))
	}
}

// Every key that the node knows the policy knows; the node's error lists them.
func TestPolicyKnowsAllKeys(t *testing.T) {
	s := serve(t)
	_, err := request.ForContainer(request.Pod{}, map[string]string{volumes: "- qqqqqqqq: 1"}, "server")
	require.Error(t, err)
	_, known, found := strings.Cut(err.Error(), "known are ")
	require.True(t, found, err)
	text := "- image: a\n  mountPath: /a\n"
	keys := strings.Split(known, ", ")
	require.Contains(t, keys, "mountPath")
	for _, key := range keys {
		if key != "image" && key != "mountPath" && key != "pullPolicy" {
			text += "  " + key + ": x\n"
		}
	}
	require.NoError(t, s.create(t.Context(), pod(map[string]string{volumes: text})))
}

func TestPolicyForTemplates(t *testing.T) {
	s := serve(t)
	bad, worse := map[string]string{volumes: ""}, map[string]string{volumes: "-"}
	job := batchv1.JobSpec{Template: template(bad)}
	for name, object := range map[string]runtime.Object{
		"ReplicaSet":  &appsv1.ReplicaSet{Spec: appsv1.ReplicaSetSpec{Template: template(bad)}},
		"StatefulSet": &appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Template: template(bad)}},
		"DaemonSet":   &appsv1.DaemonSet{Spec: appsv1.DaemonSetSpec{Template: template(bad)}},
		"Job":         &batchv1.Job{Spec: job},
		"CronJob":     &batchv1.CronJob{Spec: batchv1.CronJobSpec{JobTemplate: batchv1.JobTemplateSpec{Spec: job}}},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, s.create(t.Context(), object), "annotation "+volumes+": is not a list of volumes")
			require.NoError(t, s.admit(t.Context(), object, object, admission.Update), "it was there before")
		})
	}

	t.Run("changes", func(t *testing.T) {
		old := deployment(bad)
		next := deployment(bad)
		replicas := int32(0)
		next.Spec.Replicas, next.Finalizers = &replicas, []string{"example.com/done"}
		require.NoError(t, s.admit(t.Context(), next, old, admission.Update))
		require.Error(t, s.admit(t.Context(), deployment(worse), old, admission.Update))
		require.NoError(t, s.admit(t.Context(), deployment(nil), old, admission.Update))
		require.NoError(t, s.admit(t.Context(), pod(worse), pod(bad), admission.Update))
	})
	t.Run("on the Deployment itself", func(t *testing.T) {
		d := deployment(nil)
		d.Annotations = map[string]string{volumes: oneImage}
		require.ErrorContains(t, s.create(t.Context(), d), "annotation "+volumes+": is not on the template of the pods; move it to the metadata there")
	})
	t.Run("a label", func(t *testing.T) {
		p := pod(nil)
		p.Labels = map[string]string{exec: "true"}
		require.ErrorContains(t, s.create(t.Context(), p), "annotation "+exec+": is a label; make it an annotation")
	})
}

// The examples pass, and the node takes what they ask for.
func TestExamples(t *testing.T) {
	s := serve(t)
	files, err := filepath.Glob(filepath.Join(contrib, "examples", "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			for _, object := range objects(t, file) {
				require.NoError(t, s.create(t.Context(), object))
				pod := podOf(t, object)
				for _, c := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
					_, err := request.ForContainer(request.Pod{}, pod.Annotations, c.Name)
					require.NoError(t, err)
					_, err = request.NativeExec(request.Pod{}, pod.Annotations, c.Name)
					require.NoError(t, err)
				}
			}
		})
	}
}

func podOf(t *testing.T, object runtime.Object) corev1.PodTemplateSpec {
	t.Helper()
	switch object := object.(type) {
	case *corev1.Pod:
		return corev1.PodTemplateSpec{ObjectMeta: object.ObjectMeta, Spec: object.Spec}
	case *appsv1.Deployment:
		return object.Spec.Template
	default:
		require.Fail(t, "no pod", "in a %T", object)
		return corev1.PodTemplateSpec{}
	}
}
